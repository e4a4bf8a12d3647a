"""The process that a run is: its main, its monitor, its log and its copy of the code."""
