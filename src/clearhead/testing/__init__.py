"""What it takes to test attention: one table of cases, strategies for Hypothesis, and the error that may be made.

    cases       shapes x masks x scores x dtypes, each a problem ready to be computed
    budget      how far a result may lie from the oracle
    strategies  arrays of any layout, masks of any nesting (needs Hypothesis)

Shipped for those who build on Clearhead: whatever passes all of ``cases.grid()`` within ``budget.Oracle`` computes the
same attention. Import the modules by name; none is loaded by ``import clearhead``.
"""
