"""``python -m benchmarks.compare``: tierfs beside its peers, on one store, in one run.

==============  =====================================================================================
``__main__``    the command line
``servers``     the S3 server, Redis and the proxy: started on free loopback ports, stopped again
``proxy``       a TCP proxy that makes a near server a far one: latency and bandwidth per connection
``processes``   which processes belong to a peer, what CPU they used, what memory they hold
``peers``       one class per file system: is it here, how is it mounted, emptied, drained, unmounted
``measures``    what is done on a mounted directory, in processes that can be given up
``rounds``      the order of it all: who is measured when, what happens to one that fails
``result``      numbers of a run, ratios pair by pair, where tierfs is behind
``pictures``    the same as sections of a report
==============  =====================================================================================

The rules of :mod:`benchmarks` hold. In addition: a peer that hangs costs one time limit and not the run;
every process that a peer starts is found by a mark in its environment, and only those are ever signalled;
bytes that are read are compared with what was written, so that fast and wrong is a failure; the process
that conducts the run never touches a mountpoint itself.
"""
