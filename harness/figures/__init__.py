"""Figures drawn from tidy tables of several runs, and the sheet that every figure of the package lies on.

The figure of one drift run is harness.plots, of the map of inverses harness.maps, of the window operator
harness.operator_figure. Nothing here computes: accounts and fronts come from harness.budget, harness.memory and
harness.pareto.
"""
