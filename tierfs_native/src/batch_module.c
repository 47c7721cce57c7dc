/*
 * The extension module tierfs_native._batch: what tierfs/batch uses. Not an interface for others.
 *
 * The GIL is held whenever a Python object, the list of idle lanes or the kept memory is touched, and given up while
 * names are resolved and files are read.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "batch.h"
#include "batch_arena.h"
#include "batch_sum.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define IDLE_LANES 4
#define ALIGNMENT ((size_t)64)

static const char *const outcome_names[TIERFS_OUTCOMES] = {
    "local",  "elsewhere",  "unknown_name", "not_a_file", "being_written", "no_access",
    "absent", "unverified", "changed",      "unreadable", "replaced",
};

static PyObject *fail(int result, PyObject *path)
{
    errno = -result;
    return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
}

/* -- data bases ------------------------------------------------------------------------------------------------ */

/* One open LMDB environment: the namespace of a mount, or the index of a tier. */
struct database {
    PyObject_HEAD pid_t process; /* who opened it: nobody else may close it */
    struct tierfs_view *view;
    struct tierfs_index *index;
    PyObject *weak_references; /* so that Python can know what is open without keeping it open */
};

static PyMemberDef database_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct database, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *names_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *keys[] = {"path", NULL};
    PyObject *path;
    struct database *self;
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&:Names", keys, PyUnicode_FSConverter, &path))
        return NULL;
    self = (struct database *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->process = getpid();
        result = tierfs_view_open(PyBytes_AS_STRING(path), &self->view);
        if (result < 0) {
            self->view = NULL;
            fail(result, path);
            Py_CLEAR(self);
        }
    }
    Py_DECREF(path);
    return (PyObject *)self;
}

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *keys[] = {"path", "boot_id", NULL};
    PyObject *path;
    const char *boot_id;
    struct database *self;
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&y:Index", keys, PyUnicode_FSConverter, &path,
                                     &boot_id))
        return NULL;
    self = (struct database *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->process = getpid();
        result = tierfs_index_open(PyBytes_AS_STRING(path), boot_id, &self->index);
        if (result < 0) {
            self->index = NULL;
            fail(result, path);
            Py_CLEAR(self);
        }
    }
    Py_DECREF(path);
    return (PyObject *)self;
}

static void database_dealloc(PyObject *object)
{
    struct database *self = (struct database *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs(object);
    if (self->process == getpid()) {
        tierfs_view_close(self->view);
        tierfs_index_close(self->index);
    }
    type->tp_free(object);
    Py_DECREF(type);
}

static PyType_Slot names_slots[] = {
    {Py_tp_new, names_new},
    {Py_tp_dealloc, database_dealloc},
    {Py_tp_members, database_members},
    {Py_tp_doc, "Names(path): the namespace of a mount, open for reading. At most one per process and file."},
    {0, NULL},
};

static PyType_Spec names_spec = {
    .name = "tierfs_native._batch.Names",
    .basicsize = sizeof(struct database),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = names_slots,
};

static PyType_Slot index_slots[] = {
    {Py_tp_new, index_new},
    {Py_tp_dealloc, database_dealloc},
    {Py_tp_members, database_members},
    {Py_tp_doc,
     "Index(path, boot_id): the index of a tier, open for reading. At most one per process and file."},
    {0, NULL},
};

static PyType_Spec index_spec = {
    .name = "tierfs_native._batch.Index",
    .basicsize = sizeof(struct database),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = index_slots,
};

/* -- reader ---------------------------------------------------------------------------------------------------- */

struct reader {
    PyObject_HEAD pid_t process;
    bool believe_capabilities;
    PyObject *prefix; /* the mountpoint and a slash, as bytes */
    PyObject *names;
    PyObject *indexes; /* a tuple */
    struct tierfs_batch batch;
    struct tierfs_lane *idle[IDLE_LANES];
    size_t idle_count;
};

static int add_tier(struct reader *self, const struct tierfs_batch_module *module, PyObject *item)
{
    struct tierfs_batch_tier *tier = &self->batch.tiers[self->batch.tier_count];
    struct database *index;
    const char *root;
    struct statfs about;

    if (!PyArg_ParseTuple(item, "yO!;a tier is a pair of its root and its index", &root, module->index_type,
                          &index))
        return -1;
    if (index->process != self->process) {
        PyErr_SetString(PyExc_RuntimeError, "the index was opened by another process");
        return -1;
    }
    tier->directory = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (tier->directory < 0 || fstatfs(tier->directory, &about) < 0) {
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, root);
        if (tier->directory >= 0)
            close(tier->directory);
        return -1;
    }
    tier->is_memory = about.f_type == TMPFS_MAGIC;
    tier->index = index->index;
    self->batch.tier_count++;
    return 0;
}

static int reader_fill(struct reader *self, PyObject *args, PyObject *keywords)
{
    static char *keys[] = {"mountpoint", "names", "tiers", "owner", "believe_capabilities", NULL};
    const struct tierfs_batch_module *module = PyType_GetModuleState(Py_TYPE(self));
    const char *mountpoint;
    Py_ssize_t length;
    PyObject *names, *tiers;
    unsigned owner;
    int believe;

    if (module == NULL ||
        !PyArg_ParseTupleAndKeywords(args, keywords, "y#O!O!Ip:Reader", keys, &mountpoint, &length,
                                     module->names_type, &names, &PyTuple_Type, &tiers, &owner, &believe))
        return -1;
    self->process = getpid();
    if (((struct database *)names)->process != self->process) {
        PyErr_SetString(PyExc_RuntimeError, "the namespace was opened by another process");
        return -1;
    }
    if (PyTuple_GET_SIZE(tiers) > TIERFS_BATCH_TIERS) {
        PyErr_Format(PyExc_ValueError, "more than %d tiers", TIERFS_BATCH_TIERS);
        return -1;
    }
    while (length > 0 && mountpoint[length - 1] == '/')
        length--;
    self->prefix = PyBytes_FromStringAndSize(NULL, length + 1);
    if (self->prefix == NULL)
        return -1;
    memcpy(PyBytes_AS_STRING(self->prefix), mountpoint, (size_t)length);
    PyBytes_AS_STRING(self->prefix)[length] = '/';
    self->names = Py_NewRef(names);
    self->indexes = Py_NewRef(tiers);
    self->believe_capabilities = believe != 0;
    self->batch.view = ((struct database *)names)->view;
    self->batch.owner = owner;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tiers); i++)
        if (add_tier(self, module, PyTuple_GET_ITEM(tiers, i)) < 0)
            return -1;
    return 0;
}

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    struct reader *self = (struct reader *)type->tp_alloc(type, 0);

    if (self != NULL && reader_fill(self, args, keywords) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void reader_dealloc(PyObject *object)
{
    struct reader *self = (struct reader *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->process == getpid())
        while (self->idle_count > 0)
            tierfs_lane_close(self->idle[--self->idle_count]);
    for (size_t i = 0; i < self->batch.tier_count; i++)
        close(self->batch.tiers[i].directory);
    Py_XDECREF(self->prefix);
    Py_XDECREF(self->indexes);
    Py_XDECREF(self->names);
    type->tp_free(object);
    Py_DECREF(type);
}

static struct tierfs_lane *take_lane(struct reader *self)
{
    struct tierfs_lane *lane;
    int result;

    if (self->process != getpid()) {
        PyErr_SetString(PyExc_RuntimeError, "this reader belongs to another process");
        return NULL;
    }
    if (self->idle_count > 0)
        return self->idle[--self->idle_count];
    result = tierfs_lane_open(&self->batch, &lane);
    if (result == 0)
        return lane;
    fail(result, NULL);
    return NULL;
}

static void give_lane(struct reader *self, struct tierfs_lane *lane)
{
    if (self->idle_count < IDLE_LANES)
        self->idle[self->idle_count++] = lane;
    else
        tierfs_lane_close(lane);
}

/* -- one call -------------------------------------------------------------------------------------------------- */

struct call {
    struct tierfs_lane *lane;
    struct tierfs_caller caller;
    size_t count;
    struct tierfs_wanted *files;
    PyObject **owned; /* what the paths in files point into */
    Py_ssize_t *positions; /* in the list of results */
};

static void call_clear(struct reader *self, struct call *call)
{
    for (size_t i = 0; i < call->count; i++)
        Py_DECREF(call->owned[i]);
    if (call->lane != NULL)
        give_lane(self, call->lane);
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
static int call_collect(struct reader *self, struct call *call, PyObject *paths, PyObject *results,
                        PyObject *inodes)
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

static int call_plan(struct reader *self, struct call *call, bool names_only)
{
    int result;

    call->lane = take_lane(self);
    if (call->lane == NULL)
        return -1;
    Py_BEGIN_ALLOW_THREADS tierfs_caller_now(&call->caller, self->believe_capabilities);
    result = tierfs_batch_plan(call->lane, &call->caller, call->files, call->count, names_only);
    Py_END_ALLOW_THREADS if (result == 0) return 0;
    fail(result, NULL);
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
static PyObject *memory_for(struct reader *self, PyObject *buffer, Py_buffer *held, size_t size, char **base)
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

static int call_read(struct reader *self, struct call *call, PyObject *results, PyObject *buffer,
                     size_t start, size_t *end, size_t *local)
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

static PyObject *reader_read(struct reader *self, PyObject *args, PyObject *keywords)
{
    static char *keys[] = {"paths", "results", "buffer", "start", "inodes", NULL};
    PyObject *paths, *results, *buffer = Py_None, *inodes = Py_None;
    Py_ssize_t start = 0;
    struct call call = {0};
    size_t end = 0, local = 0;
    bool done;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!|OnO:read", keys, &PyList_Type, &paths,
                                     &PyList_Type, &results, &buffer, &start, &inodes))
        return NULL;
    if ((buffer != Py_None && !PyMemoryView_Check(buffer)) || (inodes != Py_None && !PyList_Check(inodes)) ||
        start < 0) {
        PyErr_SetString(PyExc_TypeError,
                        "buffer: a memoryview of bytes; inodes: a list; start: not negative");
        return NULL;
    }
    done = call_collect(self, &call, paths, results, inodes) == 0 && call_plan(self, &call, false) == 0 &&
           call_read(self, &call, results, buffer, (size_t)start, &end, &local) == 0;
    call_clear(self, &call);
    return done ? Py_BuildValue("(nn)", (Py_ssize_t)end, (Py_ssize_t)local) : NULL;
}

static PyObject *reader_look_up(struct reader *self, PyObject *args, PyObject *keywords)
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

static PyObject *reader_has_ring(struct reader *self, PyObject *Py_UNUSED(nothing))
{
    struct tierfs_lane *lane = take_lane(self);
    bool has;

    if (lane == NULL)
        return NULL;
    has = tierfs_lane_has_ring(lane);
    give_lane(self, lane);
    return PyBool_FromLong(has);
}

/* Through void: what PyCFunction is called with depends on the flags. */
#define METHOD(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef reader_methods[] = {
    {"read", METHOD(reader_read), METH_VARARGS | METH_KEYWORDS,
     "read(paths, results, buffer=None, start=0, inodes=None) -> (end, files)\n\nFor each path below the mountpoint whose "
     "result is None, set it to a memoryview of the file's bytes, or to the number of an outcome. The bytes go to "
     "buffer, from start, or into memory of their own; end is where the last of them ends, files how many were read. "
     "inodes: expected inode numbers, 0 for any."},
    {"look_up", METHOD(reader_look_up), METH_VARARGS | METH_KEYWORDS,
     "look_up(paths, results)\n\nThe same with (inode number, size in bytes), and nothing is read."},
    {"has_ring", METHOD(reader_has_ring), METH_NOARGS, "has_ring() -> bool\n\nWhether io_uring is in use."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_new, reader_new},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_methods, reader_methods},
    {Py_tp_doc, "Reader(mountpoint, names, tiers, owner, believe_capabilities): reads files of one mount.\n\n"
                "tiers: pairs (root, Index), fast to slow. owner: the uid whose mount it is."},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "tierfs_native._batch.Reader",
    .basicsize = sizeof(struct reader),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = reader_slots,
};

/* -- module ---------------------------------------------------------------------------------------------------- */

static PyObject *module_checksum(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    uint64_t sum;

    if (!PyArg_ParseTuple(args, "y*:checksum", &data))
        return NULL;
    sum = tierfs_block_sum(data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(sum);
}

static PyObject *module_identify(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path;
    struct statx about;
    int result;

    if (!PyArg_ParseTuple(args, "O&:identify", PyUnicode_FSConverter, &path))
        return NULL;
    result =
        statx(AT_FDCWD, PyBytes_AS_STRING(path), AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, STATX_INO, &about);
    if (result < 0)
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    Py_DECREF(path);
    if (result < 0)
        return NULL;
    return Py_BuildValue("(IIK)", about.stx_dev_major, about.stx_dev_minor,
                         (unsigned long long)about.stx_ino);
}

static PyMethodDef module_methods[] = {
    {"identify", module_identify, METH_VARARGS,
     "identify(path) -> (major, minor, inode number)\n\nLike stat, without asking a file system's server."},
    {"checksum", module_checksum, METH_VARARGS, "checksum(data) -> int\n\nXXH3, 64 bits, as tiers use it."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);

    if (type != NULL && PyModule_AddType(module, type) < 0)
        Py_CLEAR(type);
    return type;
}

static int module_execute(PyObject *module)
{
    struct tierfs_batch_module *state = PyModule_GetState(module);
    PyObject *names = PyTuple_New(TIERFS_OUTCOMES);
    int result;

    if (names == NULL)
        return -1;
    for (Py_ssize_t i = 0; i < TIERFS_OUTCOMES; i++) {
        PyObject *name = PyUnicode_FromString(outcome_names[i]);

        if (name == NULL) {
            Py_DECREF(names);
            return -1;
        }
        PyTuple_SET_ITEM(names, i, name);
    }
    result = PyModule_AddObjectRef(module, "OUTCOMES", names);
    Py_DECREF(names);
    if (result < 0)
        return -1;
    state->arena_type = add_type(module, &tierfs_arena_spec);
    state->names_type = add_type(module, &names_spec);
    state->index_type = add_type(module, &index_spec);
    state->reader_type = add_type(module, &reader_spec);
    return state->arena_type && state->names_type && state->index_type && state->reader_type ? 0 : -1;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct tierfs_batch_module *state = PyModule_GetState(module);

    Py_VISIT(state->arena_type);
    Py_VISIT(state->names_type);
    Py_VISIT(state->index_type);
    Py_VISIT(state->reader_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    struct tierfs_batch_module *state = PyModule_GetState(module);

    Py_CLEAR(state->arena_type);
    Py_CLEAR(state->names_type);
    Py_CLEAR(state->index_type);
    Py_CLEAR(state->reader_type);
    return 0;
}

static void module_free(void *module)
{
    struct tierfs_batch_module *state = PyModule_GetState(module);

    (void)module_clear(module);
    tierfs_arenas_clear(&state->arenas);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_execute},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tierfs_native._batch",
    .m_doc = "Reads many files of a mount at once, from its tier directories. Used by tierfs.batch.",
    .m_size = sizeof(struct tierfs_batch_module),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__batch(void)
{
    return PyModuleDef_Init(&module_definition);
}
