"""Attention as modules of torch: multi-head, additive (Bahdanau), multiplicative (Luong).

multihead.py         MultiHeadAttention        rotary.py      positions as turns
                                               decoding.py    attention over a cache
                                               from_torch.py  weights of nn.MultiheadAttention
additive.py          AdditiveAttention         single_head.py what the two have in common
multiplicative.py    MultiplicativeAttention   matching.py    its four scores
                                               windows.py     its three windows
                                               reweighted.py  a factor after the softmax
checks.py            what is refused           keras.py       weights of Keras's layers
"""

from clearhead.torch.modules.additive import AdditiveAttention
from clearhead.torch.modules.multihead import MultiHeadAttention
from clearhead.torch.modules.multiplicative import MultiplicativeAttention

__all__ = ["AdditiveAttention", "MultiHeadAttention", "MultiplicativeAttention"]
