/*
 * The memory that a batch is read into, as a Python object with the buffer protocol.
 *
 * Fresh memory costs more than the reading: the kernel clears every page at its first use. So what is given up is kept
 * for the next batch, within a bound. All functions want the GIL, which is what protects the kept memory.
 */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>

#define TIERFS_ARENAS_KEPT 4
#define TIERFS_ARENA_BYTES_KEPT ((size_t)64 << 20)

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

extern PyType_Spec tierfs_arena_spec;

/* A new arena of that many bytes, not cleared; *memory: where they are. NULL with an exception set. */
PyObject *tierfs_arena_new(PyTypeObject *type, size_t size, char **memory);

/* Gives the kept memory back. */
void tierfs_arenas_clear(struct tierfs_arenas *arenas);
