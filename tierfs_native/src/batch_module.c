/* The extension module tierfs_native._batch: what tierfs/batch uses. Not an interface for others. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "batch_python.h"
#include "batch_sum.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

static const char *const outcome_names[TIERFS_OUTCOMES] = {
    "local",  "elsewhere",  "unknown_name", "not_a_file", "being_written", "no_access",
    "absent", "unverified", "changed",      "unreadable", "replaced",
};

PyObject *tierfs_batch_fail(int result, PyObject *path)
{
    errno = -result;
    return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
}

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
    state->names_type = add_type(module, &tierfs_names_spec);
    state->index_type = add_type(module, &tierfs_index_spec);
    state->reader_type = add_type(module, &tierfs_reader_spec);
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
