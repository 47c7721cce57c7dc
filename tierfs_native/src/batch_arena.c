/* Memory that batches are read into, as Python objects with the buffer protocol. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "batch_python.h"

#include <stdint.h>
#include <sys/mman.h>

#define HUGE_BYTES ((size_t)2 << 20)
#define SMALL_BYTES ((size_t)64 << 10)

struct arena {
    PyObject_HEAD char *memory;
    size_t capacity;
    size_t size;
};

static struct tierfs_arenas *arenas_of(PyTypeObject *type)
{
    struct tierfs_batch_module *module = PyType_GetModuleState(type);

    return module != NULL ? &module->arenas : NULL;
}

/* The smallest kept piece that is large enough, unless it is far too large. */
static char *take_kept(struct tierfs_arenas *arenas, size_t size, size_t *capacity)
{
    size_t best = arenas->count;
    char *memory;

    for (size_t i = 0; i < arenas->count; i++) {
        const size_t here = arenas->kept[i].capacity;

        if (here >= size && here / 8 <= size + HUGE_BYTES &&
            (best == arenas->count || here < arenas->kept[best].capacity))
            best = i;
    }
    if (best == arenas->count)
        return NULL;
    memory = arenas->kept[best].memory;
    *capacity = arenas->kept[best].capacity;
    arenas->bytes -= *capacity;
    arenas->kept[best] = arenas->kept[--arenas->count];
    return memory;
}

static char *map_fresh(size_t size, size_t *capacity)
{
    const size_t unit = size >= HUGE_BYTES ? HUGE_BYTES : SMALL_BYTES;
    void *memory;

    if (size > SIZE_MAX - unit)
        return NULL;
    /* Batches differ a little in size: leave room, so that the next one fits too. Unused pages cost nothing. */
    *capacity = size >= HUGE_BYTES && size < TIERFS_ARENA_BYTES_KEPT / 2 ? size + size / 4 : size;
    *capacity = (*capacity + unit - 1) / unit * unit;
    memory = mmap(NULL, *capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    if (unit == HUGE_BYTES)
        (void)madvise(memory, *capacity, MADV_HUGEPAGE);
    return memory;
}

PyObject *tierfs_arena_new(PyTypeObject *type, size_t size, char **memory)
{
    struct tierfs_arenas *arenas = arenas_of(type);
    struct arena *arena;

    if (arenas == NULL)
        return NULL;
    if (size > (size_t)PY_SSIZE_T_MAX)
        return PyErr_NoMemory();
    arena = (struct arena *)type->tp_alloc(type, 0);
    if (arena == NULL)
        return NULL;
    arena->size = size;
    arena->memory = take_kept(arenas, size > 0 ? size : 1, &arena->capacity);
    if (arena->memory == NULL)
        arena->memory = map_fresh(size > 0 ? size : 1, &arena->capacity);
    if (arena->memory == NULL) {
        Py_DECREF(arena);
        return PyErr_NoMemory();
    }
    *memory = arena->memory;
    return (PyObject *)arena;
}

static void arena_dealloc(PyObject *self)
{
    struct arena *arena = (struct arena *)self;
    PyTypeObject *type = Py_TYPE(self);
    struct tierfs_arenas *arenas = arenas_of(type);

    if (arena->memory != NULL && arenas != NULL && arenas->count < TIERFS_ARENAS_KEPT &&
        arena->capacity <= TIERFS_ARENA_BYTES_KEPT - arenas->bytes) {
        arenas->kept[arenas->count].memory = arena->memory;
        arenas->kept[arenas->count++].capacity = arena->capacity;
        arenas->bytes += arena->capacity;
    } else if (arena->memory != NULL) {
        munmap(arena->memory, arena->capacity);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

void tierfs_arenas_clear(struct tierfs_arenas *arenas)
{
    while (arenas->count > 0) {
        arenas->count--;
        munmap(arenas->kept[arenas->count].memory, arenas->kept[arenas->count].capacity);
    }
    arenas->bytes = 0;
}

static int arena_get_buffer(PyObject *self, Py_buffer *view, int flags)
{
    struct arena *arena = (struct arena *)self;

    return PyBuffer_FillInfo(view, self, arena->memory, (Py_ssize_t)arena->size, 0, flags);
}

static PyType_Slot arena_slots[] = {
    {Py_tp_dealloc, arena_dealloc},
    {Py_bf_getbuffer, arena_get_buffer},
    {Py_tp_doc, "Memory that one batch was read into; it is used again when nobody refers to it any more."},
    {0, NULL},
};

PyType_Spec tierfs_arena_spec = {
    .name = "tierfs_native._batch.Arena",
    .basicsize = sizeof(struct arena),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = arena_slots,
};
