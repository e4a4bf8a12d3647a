"""``forebay compare``: judges a recording again with other hooks, rewards or settings, and compares the results.

``compare_command.py`` reads the flags. ``what_if.py`` checks the changes, decides which hooks can be called, sends the
groups through ``buffer/rehearsed_groups.py``, and totals the results with ``replay/comparison.py``. ``new_rewards.py``
calls the function of ``--reward``. ``comparison_summary.py`` shows the result, and ``replay/comparison_plots.py`` draws
it.
"""
