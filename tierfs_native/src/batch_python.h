/*
 * What the sources of the extension module share: its state and its types. Everything here wants the GIL.
 */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "batch.h"

#include <stddef.h>

#define TIERFS_ARENAS_KEPT 4
#define TIERFS_ARENA_BYTES_KEPT ((size_t)64 << 20)

/*
 * Memory of arenas that nobody refers to any more. Fresh memory costs more than the reading: the kernel clears every
 * page at its first use. So what is given up is kept for the next batch, within a bound.
 */
struct tierfs_arenas {
    size_t count;
    size_t bytes;
    struct {
        char *memory;
        size_t capacity;
    } kept[TIERFS_ARENAS_KEPT];
};

/* In the state of the module, beside its types. */
struct tierfs_batch_module {
    PyTypeObject *arena_type;
    PyTypeObject *names_type;
    PyTypeObject *index_type;
    PyTypeObject *reader_type;
    struct tierfs_arenas arenas;
};

/* One open LMDB environment: the namespace of a mount (view), or the index of a tier. */
struct tierfs_database {
    PyObject_HEAD pid_t process; /* who opened it: nobody else may close it */
    struct tierfs_view *view;
    struct tierfs_index *index;
    PyObject *weak_references; /* so that Python can know what is open without keeping it open */
};

extern PyType_Spec tierfs_arena_spec, tierfs_names_spec, tierfs_index_spec, tierfs_reader_spec;

/* A new arena of that many bytes, not cleared; *memory: where they are. NULL with an exception set. */
PyObject *tierfs_arena_new(PyTypeObject *type, size_t size, char **memory);

/* Gives the kept memory back. */
void tierfs_arenas_clear(struct tierfs_arenas *arenas);

/* Sets an OSError from a negative errno; path may be NULL. Returns NULL. */
PyObject *tierfs_batch_fail(int result, PyObject *path);
