"""Recorder of training steps, for ``verify``, the guard, ``scaling`` and the lines about slow steps.

``actions`` names the actions of a step, and ``clock`` measures the time of each part of a step.
"""
