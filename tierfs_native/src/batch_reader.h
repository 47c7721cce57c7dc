/*
 * The type Reader, for its parts alone: batch_reader.c (the object and its lanes), batch_call.c (its methods that read).
 *
 * The GIL is held whenever a Python object, the list of idle lanes or the kept memory is touched, and given up while
 * names are resolved and files are read. Several threads may be in a call at a time, each with a lane of its own.
 */
#pragma once

#include "batch_python.h"

#include <stdbool.h>
#include <stddef.h>

#define TIERFS_IDLE_LANES 4

struct tierfs_batch_reader {
    PyObject_HEAD pid_t process;
    bool believe_capabilities;
    PyObject *prefix; /* the mountpoint and a slash, as bytes */
    PyObject *names;
    PyObject *indexes; /* a tuple */
    struct tierfs_batch batch;
    struct tierfs_lane *idle[TIERFS_IDLE_LANES];
    size_t idle_count;
};

/* A lane for one call, to be given back. NULL with an exception set: also in a child of the process that made it. */
struct tierfs_lane *tierfs_batch_reader_take_lane(struct tierfs_batch_reader *self);
void tierfs_batch_reader_give_lane(struct tierfs_batch_reader *self, struct tierfs_lane *lane);

/* Methods. NULL with an exception set; results that were set until then stay. */
PyObject *tierfs_batch_reader_read(struct tierfs_batch_reader *self, PyObject *args, PyObject *keywords);
PyObject *tierfs_batch_reader_look_up(struct tierfs_batch_reader *self, PyObject *args, PyObject *keywords);
