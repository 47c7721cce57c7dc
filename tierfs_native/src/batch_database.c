/* The types Names and Index: LMDB environments as Python objects. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "batch_python.h"

#include <unistd.h>

static PyMemberDef database_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct tierfs_database, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *names_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *keys[] = {"path", NULL};
    PyObject *path;
    struct tierfs_database *self;
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&:Names", keys, PyUnicode_FSConverter, &path))
        return NULL;
    self = (struct tierfs_database *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->process = getpid();
        result = tierfs_view_open(PyBytes_AS_STRING(path), &self->view);
        if (result < 0) {
            self->view = NULL;
            tierfs_batch_fail(result, path);
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
    struct tierfs_database *self;
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&y:Index", keys, PyUnicode_FSConverter, &path,
                                     &boot_id))
        return NULL;
    self = (struct tierfs_database *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->process = getpid();
        result = tierfs_index_open(PyBytes_AS_STRING(path), boot_id, &self->index);
        if (result < 0) {
            self->index = NULL;
            tierfs_batch_fail(result, path);
            Py_CLEAR(self);
        }
    }
    Py_DECREF(path);
    return (PyObject *)self;
}

static void database_dealloc(PyObject *object)
{
    struct tierfs_database *self = (struct tierfs_database *)object;
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

PyType_Spec tierfs_names_spec = {
    .name = "tierfs_native._batch.Names",
    .basicsize = sizeof(struct tierfs_database),
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

PyType_Spec tierfs_index_spec = {
    .name = "tierfs_native._batch.Index",
    .basicsize = sizeof(struct tierfs_database),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = index_slots,
};
