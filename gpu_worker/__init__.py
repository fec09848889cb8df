"""The worker: a torch model over paged KV, run by plans.

OpenMP reads its wait policy when torch is loaded, so it is set here, before anything of the package can import torch:
threads that spin at a barrier take the cores which the gateway, the scheduler or another worker needs meanwhile.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
