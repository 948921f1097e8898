"""Parameter server: servers hold the parameters and the optimizer, workers push gradients and pull parameters.

The design follows Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), and ps-lite.
The package needs only torch and pyzmq, so a script without Lightning can use it.
"""
