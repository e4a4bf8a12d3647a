"""``forebay compare``: a recording as it was judged, and as it would be by other hooks, rewards or settings.

``compare_command.py`` reads the flags, ``changed_settings.py`` those of ``--set``; ``judging_code.py`` finds out whose
hooks can be asked, and ``new_rewards.py`` asks the function of ``--reward``. ``what_if.py`` sends the groups through
``buffer/rehearsed_groups.py`` and has ``replay/comparison.py`` add up what becomes of them; ``comparison_summary.py``
shows it, ``replay/comparison_plots.py`` draws it.
"""
