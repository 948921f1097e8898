"""Recorder of training steps, for ``verify``, the guard, ``scaling`` and the lines about slow steps.

``steps`` observes the events of a step, and tells all readers; ``actions`` names the actions of a step, and ``clock``
measures the time of each part of a step.
"""
