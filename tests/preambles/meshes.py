import logging
import warnings

# torch warns of what it does itself in FSDP2.
warnings.filterwarnings("ignore", module="torch")
logging.getLogger("torch").setLevel(logging.ERROR)
