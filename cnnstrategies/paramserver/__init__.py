"""Parameter server: servers hold the parameters and the optimizer, workers push gradients and pull parameters.

After Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014) and ps-lite. Needs torch
and pyzmq only; a script without Lightning can use it.
"""
