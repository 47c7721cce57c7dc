/* The type Reader: reads files of one mount. What one call does is in batch_call.c. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "batch_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

static int add_tier(struct tierfs_batch_reader *self, const struct tierfs_batch_module *module,
                    PyObject *item)
{
    struct tierfs_batch_tier *tier = &self->batch.tiers[self->batch.tier_count];
    struct tierfs_database *index;
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

static int reader_fill(struct tierfs_batch_reader *self, PyObject *args, PyObject *keywords)
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
    if (((struct tierfs_database *)names)->process != self->process) {
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
    self->batch.view = ((struct tierfs_database *)names)->view;
    self->batch.owner = owner;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tiers); i++)
        if (add_tier(self, module, PyTuple_GET_ITEM(tiers, i)) < 0)
            return -1;
    return 0;
}

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    struct tierfs_batch_reader *self = (struct tierfs_batch_reader *)type->tp_alloc(type, 0);

    if (self != NULL && reader_fill(self, args, keywords) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void reader_dealloc(PyObject *object)
{
    struct tierfs_batch_reader *self = (struct tierfs_batch_reader *)object;
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

struct tierfs_lane *tierfs_batch_reader_take_lane(struct tierfs_batch_reader *self)
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
    tierfs_batch_fail(result, NULL);
    return NULL;
}

void tierfs_batch_reader_give_lane(struct tierfs_batch_reader *self, struct tierfs_lane *lane)
{
    if (self->idle_count < TIERFS_IDLE_LANES)
        self->idle[self->idle_count++] = lane;
    else
        tierfs_lane_close(lane);
}

static PyObject *reader_has_ring(struct tierfs_batch_reader *self, PyObject *Py_UNUSED(nothing))
{
    struct tierfs_lane *lane = tierfs_batch_reader_take_lane(self);
    bool has;

    if (lane == NULL)
        return NULL;
    has = tierfs_lane_has_ring(lane);
    tierfs_batch_reader_give_lane(self, lane);
    return PyBool_FromLong(has);
}

/* Through void: what PyCFunction is called with depends on the flags. */
#define METHOD(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef reader_methods[] = {
    {"read", METHOD(tierfs_batch_reader_read), METH_VARARGS | METH_KEYWORDS,
     "read(paths, results, buffer=None, start=0, inodes=None, reserved=None) -> (end, files)\n\nFor each path below the mountpoint whose "
     "result is None, set it to a memoryview of the file's bytes, or to the number of an outcome. The bytes go to "
     "buffer, from start, or into memory of their own; end is where the last of them ends, files how many were read. "
     "inodes: expected inode numbers, 0 for any. reserved: a list that gets (place in buffer, size) of what was laid out and then not read."},
    {"look_up", METHOD(tierfs_batch_reader_look_up), METH_VARARGS | METH_KEYWORDS,
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

PyType_Spec tierfs_reader_spec = {
    .name = "tierfs_native._batch.Reader",
    .basicsize = sizeof(struct tierfs_batch_reader),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = reader_slots,
};
