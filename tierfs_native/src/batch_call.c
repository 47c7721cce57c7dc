/* One call of a Reader: which of the paths are local, where their bytes go, and what each result is. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "batch_reader.h"

#include <string.h>

#define ALIGNMENT ((size_t)64)

struct call {
    struct tierfs_lane *lane;
    struct tierfs_caller caller;
    size_t count;
    struct tierfs_wanted *files;
    PyObject **owned; /* what the paths in files point into */
    Py_ssize_t *positions; /* in the list of results */
};

static void call_clear(struct tierfs_batch_reader *self, struct call *call)
{
    for (size_t i = 0; i < call->count; i++)
        Py_DECREF(call->owned[i]);
    if (call->lane != NULL)
        tierfs_batch_reader_give_lane(self, call->lane);
    PyMem_Free(call->owned);
    PyMem_Free(call->positions);
    PyMem_Free(call->files);
}

static int read_inode_number(PyObject *inodes, Py_ssize_t position, uint64_t *number)
{
    PyObject *item;

    *number = 0;
    if (inodes == NULL || inodes == Py_None)
        return 0;
    item = PyList_GetItem(inodes, position);
    if (item == NULL)
        return -1;
    *number = PyLong_AsUnsignedLongLong(item);
    return PyErr_Occurred() ? -1 : 0;
}

/* Those of the paths that have no result yet and lie below the mountpoint. */
static int call_collect(struct tierfs_batch_reader *self, struct call *call, PyObject *paths,
                        PyObject *results, PyObject *inodes)
{
    const size_t total = (size_t)PyList_GET_SIZE(paths);
    const char *prefix = PyBytes_AS_STRING(self->prefix);
    const size_t prefix_bytes = (size_t)PyBytes_GET_SIZE(self->prefix);

    if (PyList_GET_SIZE(results) != PyList_GET_SIZE(paths)) {
        PyErr_SetString(PyExc_ValueError, "one result for each path");
        return -1;
    }
    call->files = PyMem_Calloc(total > 0 ? total : 1, sizeof(*call->files));
    call->owned = PyMem_Calloc(total > 0 ? total : 1, sizeof(*call->owned));
    call->positions = PyMem_Calloc(total > 0 ? total : 1, sizeof(*call->positions));
    if (call->files == NULL || call->owned == NULL || call->positions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < total; i++) {
        struct tierfs_wanted *file = &call->files[call->count];
        PyObject *path;
        size_t length;

        /* A path may be of any class, and its __fspath__ may do anything, also to our lists. */
        if ((Py_ssize_t)i >= PyList_GET_SIZE(paths) || (Py_ssize_t)i >= PyList_GET_SIZE(results)) {
            PyErr_SetString(PyExc_RuntimeError, "the list of paths changed");
            return -1;
        }
        if (PyList_GET_ITEM(results, (Py_ssize_t)i) != Py_None)
            continue;
        if (!PyUnicode_FSConverter(PyList_GET_ITEM(paths, (Py_ssize_t)i), &path))
            return -1;
        length = (size_t)PyBytes_GET_SIZE(path);
        if (length <= prefix_bytes || memcmp(PyBytes_AS_STRING(path), prefix, prefix_bytes) != 0) {
            Py_DECREF(path);
            continue;
        }
        file->path = PyBytes_AS_STRING(path) + prefix_bytes;
        file->path_bytes = length - prefix_bytes;
        call->positions[call->count] = (Py_ssize_t)i;
        call->owned[call->count++] = path;
        if (read_inode_number(inodes, (Py_ssize_t)i, &file->expected_ino) < 0)
            return -1;
    }
    return 0;
}

static int call_plan(struct tierfs_batch_reader *self, struct call *call, bool names_only)
{
    int result;

    call->lane = tierfs_batch_reader_take_lane(self);
    if (call->lane == NULL)
        return -1;
    Py_BEGIN_ALLOW_THREADS tierfs_caller_now(&call->caller, self->believe_capabilities);
    result = tierfs_batch_plan(call->lane, &call->caller, call->files, call->count, names_only);
    Py_END_ALLOW_THREADS if (result == 0) return 0;
    tierfs_batch_fail(result, NULL);
    return -1;
}

/* Steals result. */
static int set_result(const struct call *call, size_t i, PyObject *results, PyObject *result)
{
    return result == NULL ? -1 : PyList_SetItem(results, call->positions[i], result);
}

/* Where each file goes, behind start: at multiples of ALIGNMENT, in order. *end: behind the last. */
static int lay_out(const struct call *call, size_t start, size_t *places, size_t *end)
{
    *end = start;
    for (size_t i = 0; i < call->count; i++) {
        const struct tierfs_wanted *file = &call->files[i];

        if (file->outcome != TIERFS_LOCAL)
            continue;
        if (*end > (size_t)PY_SSIZE_T_MAX - ALIGNMENT ||
            file->size_bytes > (size_t)PY_SSIZE_T_MAX - ALIGNMENT - *end) {
            PyErr_NoMemory();
            return -1;
        }
        places[i] = (*end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        *end = places[i] + (size_t)file->size_bytes;
    }
    return 0;
}

/*
 * A view of all that is read into: the caller's own (held: so that it cannot be released meanwhile), or of a new arena.
 * *base: its first byte.
 */
static PyObject *memory_for(struct tierfs_batch_reader *self, PyObject *buffer, Py_buffer *held, size_t size,
                            char **base)
{
    const struct tierfs_batch_module *module = PyType_GetModuleState(Py_TYPE(self));
    PyObject *arena, *view;

    if (buffer != Py_None) {
        if (PyObject_GetBuffer(buffer, held, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0)
            return NULL;
        *base = held->buf;
        if ((size_t)held->len >= size)
            return Py_NewRef(buffer);
        PyErr_Format(PyExc_ValueError, "the buffer has %zd bytes, and %zu are needed", held->len, size);
        return NULL;
    }
    if (module == NULL)
        return NULL;
    arena = tierfs_arena_new(module->arena_type, size, base);
    if (arena == NULL)
        return NULL;
    view = PyMemoryView_FromObject(arena);
    Py_DECREF(arena);
    return view;
}

/* A file that was local when memory was laid out and is not any more: what else is read of it may go to its place. */
static int note_reserved(const struct call *call, size_t i, PyObject *reserved, size_t place)
{
    PyObject *pair;

    if (reserved == Py_None || call->files[i].destination == NULL)
        return 0;
    pair = Py_BuildValue("(nn)", (Py_ssize_t)place, (Py_ssize_t)call->files[i].size_bytes);
    return pair == NULL ? -1 : PyList_SetItem(reserved, call->positions[i], pair);
}

static int call_read(struct tierfs_batch_reader *self, struct call *call, PyObject *results, PyObject *buffer,
                     size_t start, PyObject *reserved, size_t *end, size_t *local)
{
    size_t *places = PyMem_Calloc(call->count > 0 ? call->count : 1, sizeof(*places));
    PyObject *view = NULL;
    Py_buffer held = {0};
    char *base = NULL;
    int status = -1;

    if (places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (lay_out(call, start, places, end) < 0)
        goto out;
    view = memory_for(self, buffer, &held, *end, &base);
    if (view == NULL)
        goto out;
    for (size_t i = 0; i < call->count; i++)
        if (call->files[i].outcome == TIERFS_LOCAL)
            call->files[i].destination = base + places[i];
    Py_BEGIN_ALLOW_THREADS tierfs_batch_read(call->lane, call->files, call->count);
    Py_END_ALLOW_THREADS for (size_t i = 0; i < call->count; i++)
    {
        const struct tierfs_wanted *file = &call->files[i];
        PyObject *result;

        if (file->outcome == TIERFS_LOCAL) {
            result = PySequence_GetSlice(view, (Py_ssize_t)places[i],
                                         (Py_ssize_t)(places[i] + (size_t)file->size_bytes));
            *local += 1;
        } else {
            result = PyLong_FromLong((long)file->outcome);
            if (note_reserved(call, i, reserved, places[i]) < 0)
                Py_CLEAR(result);
        }
        if (set_result(call, i, results, result) < 0)
            goto out;
    }
    status = 0;
out:
    Py_XDECREF(view);
    if (held.obj != NULL)
        PyBuffer_Release(&held);
    PyMem_Free(places);
    return status;
}

PyObject *tierfs_batch_reader_read(struct tierfs_batch_reader *self, PyObject *args, PyObject *keywords)
{
    static char *keys[] = {"paths", "results", "buffer", "start", "inodes", "reserved", NULL};
    PyObject *paths, *results, *buffer = Py_None, *inodes = Py_None, *reserved = Py_None;
    Py_ssize_t start = 0;
    struct call call = {0};
    size_t end = 0, local = 0;
    bool done;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!|OnOO:read", keys, &PyList_Type, &paths,
                                     &PyList_Type, &results, &buffer, &start, &inodes, &reserved))
        return NULL;
    if ((buffer != Py_None && !PyMemoryView_Check(buffer)) || (inodes != Py_None && !PyList_Check(inodes)) ||
        (reserved != Py_None && !PyList_Check(reserved)) || start < 0) {
        PyErr_SetString(PyExc_TypeError,
                        "buffer: a memoryview of bytes; inodes, reserved: lists; start: not negative");
        return NULL;
    }
    end = (size_t)start;
    done = call_collect(self, &call, paths, results, inodes) == 0;
    if (done && call.count > 0)
        done = call_plan(self, &call, false) == 0 &&
               call_read(self, &call, results, buffer, (size_t)start, reserved, &end, &local) == 0;
    call_clear(self, &call);
    return done ? Py_BuildValue("(nn)", (Py_ssize_t)end, (Py_ssize_t)local) : NULL;
}

PyObject *tierfs_batch_reader_look_up(struct tierfs_batch_reader *self, PyObject *args, PyObject *keywords)
{
    static char *keys[] = {"paths", "results", NULL};
    PyObject *paths, *results;
    struct call call = {0};
    bool done;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!:look_up", keys, &PyList_Type, &paths, &PyList_Type,
                                     &results))
        return NULL;
    done = call_collect(self, &call, paths, results, NULL) == 0 && call_plan(self, &call, true) == 0;
    for (size_t i = 0; i < call.count && done; i++) {
        const struct tierfs_wanted *file = &call.files[i];
        PyObject *result;

        if (file->outcome == TIERFS_LOCAL)
            result =
                Py_BuildValue("(KK)", (unsigned long long)file->ino, (unsigned long long)file->size_bytes);
        else
            result = PyLong_FromLong((long)file->outcome);
        done = set_result(&call, i, results, result) == 0;
    }
    call_clear(self, &call);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}
