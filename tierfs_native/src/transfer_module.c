/* The extension module tierfs_native._transfer: what tierfs/cache uses. Not an interface for others. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "batch_index.h"
#include "transfer.h"
#include "transfer_python.h"

static PyObject *module_receive(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct tierfs_transfer transfer = {0};
    struct tierfs_transfer_result result;
    unsigned long long offset, length;
    Py_buffer head;
    PyObject *sums;

    if (!PyArg_ParseTuple(args, "iiKKy*i:receive", &transfer.source, &transfer.target, &offset, &length,
                          &head, &transfer.timeout_ms))
        return NULL;
    transfer.target_offset = offset;
    transfer.length = length;
    transfer.head = head.buf;
    transfer.head_bytes = (size_t)head.len;
    if (length == 0 || length > PY_SSIZE_T_MAX || transfer.head_bytes > length) {
        PyBuffer_Release(&head);
        PyErr_SetString(PyExc_ValueError, "receive: a length that cannot be");
        return NULL;
    }
    sums = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)((length + TIERFS_BLOCK_BYTES - 1) / TIERFS_BLOCK_BYTES * sizeof(uint64_t)));
    if (sums == NULL) {
        PyBuffer_Release(&head);
        return NULL;
    }
    /* Nobody else knows of these bytes yet. They are aligned: the object's head is a multiple of 8. */
    uint64_t *out = (void *)PyBytes_AS_STRING(sums);
    Py_BEGIN_ALLOW_THREADS tierfs_transfer(&transfer, out, &result);
    Py_END_ALLOW_THREADS PyBuffer_Release(&head);
    return Py_BuildValue("(NKii)", sums, (unsigned long long)result.received, result.source_errno,
                         result.target_errno);
}

static PyMethodDef module_methods[] = {
    {"receive", module_receive, METH_VARARGS,
     "receive(source, target, target_offset, length, head, timeout_ms)\n"
     "    -> (checksums, bytes received, errno of the source, errno of the target)\n\n"
     "Copy a body from a descriptor into a file, without the GIL. See transfer.h."},
    {NULL, NULL, 0, NULL},
};

static int module_execute(PyObject *module)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &tierfs_getter_spec, NULL);
    int result = type != NULL ? PyModule_AddType(module, type) : -1;

    Py_XDECREF(type);
    return result;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_execute},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tierfs_native._transfer",
    .m_doc = "Bodies of answers, from a socket into a file. Used by tierfs.cache.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__transfer(void)
{
    return PyModuleDef_Init(&module_definition);
}
