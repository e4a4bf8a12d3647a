"""``forebay compare``: a recording as it was judged, and as it would be by other hooks, rewards or settings.

``compare_command.py`` reads the flags. ``what_if.py`` checks what changes, finds out whose hooks can be asked, sends
the groups through ``buffer/rehearsed_groups.py``, and has ``replay/comparison.py`` add up what becomes of them;
``new_rewards.py`` asks the function of ``--reward``. ``comparison_summary.py`` shows the result, and
``replay/comparison_plots.py`` draws it.
"""
