/*
 * The type Getter of tierfs_native._transfer: transfer_get.h for Python. What a get uses are objects that it holds until
 * it is taken; nobody else has seen those that are written into.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "batch_index.h"
#include "transfer_get.h"
#include "transfer_python.h"

#include <errno.h>

struct job {
    struct tierfs_get get; /* first: the getter knows only this */
    unsigned long long number;
    PyObject *request, *etag, *path, *sums, *body;
};

struct getter {
    PyObject_HEAD struct tierfs_getter *getter; /* NULL: closed */
    unsigned long long submitted;
};

static void job_free(struct job *job)
{
    Py_XDECREF(job->request);
    Py_XDECREF(job->etag);
    Py_XDECREF(job->path);
    Py_XDECREF(job->sums);
    Py_XDECREF(job->body);
    PyMem_Free(job);
}

static void fail(int result)
{
    errno = -result;
    PyErr_SetFromErrno(PyExc_OSError);
}

static bool is_open(const struct getter *self)
{
    if (self->getter == NULL)
        PyErr_SetString(PyExc_ValueError, "the getter is closed");
    return self->getter != NULL;
}

static PyObject *getter_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *keys[] = {"host", "port", "threads", "connect_timeout_ms", "timeout_ms", NULL};
    struct tierfs_getter_settings settings;
    struct getter *self;
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "ssIii:Getter", keys, &settings.host, &settings.port,
                                     &settings.threads, &settings.connect_timeout_ms, &settings.timeout_ms))
        return NULL;
    self = (struct getter *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    result = tierfs_getter_open(&settings, &self->getter);
    if (result == 0)
        return (PyObject *)self;
    fail(result);
    Py_DECREF(self);
    return NULL;
}

static void close_getter(struct getter *self)
{
    struct tierfs_getter *getter = self->getter;
    struct tierfs_get *left;

    if (getter == NULL)
        return;
    self->getter = NULL;
    Py_BEGIN_ALLOW_THREADS left = tierfs_getter_close(getter);
    Py_END_ALLOW_THREADS while (left != NULL)
    {
        struct job *job = (struct job *)left;

        left = left->next;
        job_free(job);
    }
}

static void getter_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    close_getter((struct getter *)object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *getter_fileno(struct getter *self, PyObject *Py_UNUSED(nothing))
{
    return is_open(self) ? PyLong_FromLong(tierfs_getter_descriptor(self->getter)) : NULL;
}

/* The objects that the get writes into, and all its pointers. 0 or -1. */
static int job_prepare(struct job *job, bool wants_body)
{
    const uint64_t length = job->get.length;
    const uint64_t blocks = (length + TIERFS_BLOCK_BYTES - 1) / TIERFS_BLOCK_BYTES;

    if (length == 0 || length > PY_SSIZE_T_MAX / 2) {
        PyErr_SetString(PyExc_ValueError, "submit: a length that cannot be");
        return -1;
    }
    job->sums = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(blocks * sizeof(uint64_t)));
    if (wants_body)
        job->body = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    if (job->sums == NULL || (wants_body && job->body == NULL))
        return -1;
    job->get.request = PyBytes_AS_STRING(job->request);
    job->get.request_bytes = (size_t)PyBytes_GET_SIZE(job->request);
    job->get.etag = PyBytes_AS_STRING(job->etag);
    job->get.etag_bytes = (size_t)PyBytes_GET_SIZE(job->etag);
    job->get.path = PyBytes_AS_STRING(job->path);
    /* Aligned: the object's head is a multiple of 8. */
    job->get.sums = (void *)PyBytes_AS_STRING(job->sums);
    job->get.body = wants_body ? PyBytes_AS_STRING(job->body) : NULL;
    return 0;
}

static PyObject *getter_submit(struct getter *self, PyObject *args)
{
    unsigned long long offset, length, target_offset;
    PyObject *request, *etag;
    int create, wants_body;
    struct job *job;
    int result;

    if (!is_open(self))
        return NULL;
    job = PyMem_Calloc(1, sizeof *job);
    if (job == NULL)
        return PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "SSKKO&pKp:submit", &request, &etag, &offset, &length, PyUnicode_FSConverter,
                          &job->path, &create, &target_offset, &wants_body)) {
        job_free(job);
        return NULL;
    }
    job->request = Py_NewRef(request);
    job->etag = Py_NewRef(etag);
    job->get.offset = offset;
    job->get.length = length;
    job->get.create = create != 0;
    job->get.target_offset = target_offset;
    if (job_prepare(job, wants_body != 0) < 0) {
        job_free(job);
        return NULL;
    }
    job->number = ++self->submitted;
    result = tierfs_getter_submit(self->getter, &job->get);
    if (result < 0) {
        job_free(job);
        fail(result);
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(self->submitted);
}

static PyObject *getter_take(struct getter *self, PyObject *Py_UNUSED(nothing))
{
    struct tierfs_get *done;
    PyObject *found;

    if (!is_open(self))
        return NULL;
    found = PyList_New(0);
    if (found == NULL)
        return NULL;
    done = tierfs_getter_take(self->getter);
    while (done != NULL) {
        struct job *job = (struct job *)done;
        PyObject *item = NULL;

        done = done->next;
        if (found != NULL)
            item = Py_BuildValue("(KiOO)", job->number, job->get.result,
                                 job->get.result == 0 ? job->sums : Py_None,
                                 job->get.result == 0 && job->body != NULL ? job->body : Py_None);
        if (found != NULL && (item == NULL || PyList_Append(found, item) < 0))
            Py_CLEAR(found);
        Py_XDECREF(item);
        job_free(job);
    }
    return found;
}

static PyObject *getter_close(struct getter *self, PyObject *Py_UNUSED(nothing))
{
    close_getter(self);
    Py_RETURN_NONE;
}

/* Through void: what PyCFunction is called with depends on the flags. */
#define METHOD(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef getter_methods[] = {
    {"submit", METHOD(getter_submit), METH_VARARGS,
     "submit(request, etag, offset, length, path, create, target_offset, wants_body) -> number\n\n"
     "Send the request, and take the body of the reply into the file. See transfer_get.h."},
    {"take", METHOD(getter_take), METH_NOARGS,
     "take() -> [(number, errno, checksums, body)]\n\n"
     "What has ended since the last call; an errno other than 0: nothing is known of the bytes in the file."},
    {"fileno", METHOD(getter_fileno), METH_NOARGS,
     "fileno() -> int\n\nCan be read when there is something to take."},
    {"close", METHOD(getter_close), METH_NOARGS,
     "close()\n\nBreak off what is under way; blocks until that has ended."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot getter_slots[] = {
    {Py_tp_new, getter_new},
    {Py_tp_dealloc, getter_dealloc},
    {Py_tp_methods, getter_methods},
    {Py_tp_doc,
     "Getter(host, port, threads, connect_timeout_ms, timeout_ms): GETs over plain HTTP, into files."},
    {0, NULL},
};

PyType_Spec tierfs_getter_spec = {
    .name = "tierfs_native._transfer.Getter",
    .basicsize = sizeof(struct getter),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = getter_slots,
};
