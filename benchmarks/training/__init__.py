"""``python -m benchmarks.training``: the libraries that read training data, on a mount and on a directory.

Nothing is imitated: PyTorch's DataLoader with persistent workers over webdataset shards and over single
files, safetensors and ``torch.load(mmap=True)``, Hugging Face datasets over Arrow files, a vector index read
at random (a memory map and faiss), and DLIO, the driver of MLPerf Storage. They are large, so they live in an
environment of their own, which ``run.sh`` makes, and run there as the scripts in ``loads/``, which import
nothing of tierfs.

============  =======================================================================================
``plan``      the loads: what each measures, with how much data
``driver``    runs one script with a limit and reads what it prints
``rounds``    makes the data, fills the store, runs the loads in alternating order
``result``    the numbers, and ratios pair by pair
``pictures``  the same as a report
``loads/``    the scripts: ``make`` writes data, ``run`` reads them, checks them and measures
``tools/``    a program that DLIO calls, and that would have to come with a large package
============  =======================================================================================

Every load checks what it reads. Each run on the mount begins with a new, empty mount, and each on the
directory with dropped kernel caches (where root runs it), so that the first epoch is a cold one for both.
"""
