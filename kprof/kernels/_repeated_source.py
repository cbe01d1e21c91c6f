"""The C of calls that are made again: what Python hands over once, and what is done at every call.

It needs nothing but Python: no header of torch or CUDA, whose functions are handed over, too.
"""

SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST 64
enum { NOTHING, ONE, LIST, TUPLE };

typedef int (*launch_t)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned threads, unsigned y, unsigned z, unsigned shared, void *stream,
                        void **parameters, void **extra);

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *keep;     /* owns all objects below */
  PyObject *expected; /* of every argument: Ellipsis for a tensor, or the value */
  PyObject *quiet;    /* functions that return something false */
  PyObject *hooks;    /* where each is, its name, the chain that it is, and the empty list in it */
  PyObject *check;    /* is given the tensors and returns True, or None */
  PyObject *makers;   /* of every result a function */
  PyObject *data_ptr; /* the method of tensors */
  PyObject *device, *current_device, *current_stream;
  launch_t launch;
  void *function;
  unsigned grid[3], threads, shared;
  int form, num_parameters;
  uint64_t values[MOST];
  signed char places[MOST];  /* in arguments and results; less than 0: a constant */
  unsigned char offsets[MOST]; /* of the address, from what is aligned */
} Call;

/* Whether nobody wants to hear of launches: 1, 0, or -1 with an exception. */
static int is_quiet(Call *call) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call->quiet); i++) {
    PyObject *told = PyObject_CallNoArgs(PyTuple_GET_ITEM(call->quiet, i));
    if (!told) return -1;
    int is_loud = PyObject_IsTrue(told);
    Py_DECREF(told);
    if (is_loud) return is_loud < 0 ? -1 : 0;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call->hooks); i++) {
    PyObject *hook = PyTuple_GET_ITEM(call->hooks, i);
    PyObject *now = PyObject_GetAttr(PyTuple_GET_ITEM(hook, 0), PyTuple_GET_ITEM(hook, 1));
    if (!now) return -1;
    Py_DECREF(now);
    if (now != PyTuple_GET_ITEM(hook, 2) || PyList_GET_SIZE(PyTuple_GET_ITEM(hook, 3))) return 0;
  }
  return 1;
}

/* 1, 0, or -1 with an exception. */
static int is_alike(Call *call, PyObject *const *arguments) {
  PyObject *tensors[MOST];
  Py_ssize_t num_tensors = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call->expected); i++) {
    PyObject *value = PyTuple_GET_ITEM(call->expected, i), *given = arguments[i];
    if (value == Py_Ellipsis) {
      tensors[num_tensors++] = given;
    } else if (value != given) {
      if (Py_TYPE(value) != Py_TYPE(given)) return 0;
      int is_same = PyObject_RichCompareBool(value, given, Py_EQ);
      if (is_same <= 0) return is_same;
    }
  }
  int status = is_quiet(call);
  if (status <= 0) return status;
  PyObject *device = PyObject_CallNoArgs(call->current_device);
  if (!device) return -1;
  int is_current = PyObject_RichCompareBool(device, call->device, Py_EQ);
  Py_DECREF(device);
  if (is_current <= 0 || call->check == Py_None) return is_current;
  PyObject *checked = PyObject_Vectorcall(call->check, tensors, num_tensors, NULL);
  if (!checked) return -1;
  Py_DECREF(checked);
  return checked == Py_True;
}

static int make_results(Call *call, PyObject **results) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call->makers); i++)
    if (!(results[i] = PyObject_CallNoArgs(PyTuple_GET_ITEM(call->makers, i)))) return -1;
  return 1;
}

/* 1, 0 where it was not launched, or -1 with an exception. */
static int launch(Call *call, PyObject *const *arguments, PyObject **results) {
  Py_ssize_t num_arguments = PyTuple_GET_SIZE(call->expected);
  uint64_t values[MOST];
  void *parameters[MOST];
  for (int i = 0; i < call->num_parameters; i++) {
    int place = call->places[i];
    parameters[i] = &values[i];
    values[i] = call->values[i];
    if (place < 0) continue;
    PyObject *one = place < num_arguments ? arguments[place] : results[place - num_arguments];
    PyObject *address = PyObject_CallOneArg(call->data_ptr, one);
    if (!address) return -1;
    values[i] = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    if (PyErr_Occurred()) return -1;
    if (values[i] % 16 != call->offsets[i]) return 0;
  }
  PyObject *told = PyObject_CallOneArg(call->current_stream, call->device);
  if (!told) return -1;
  uint64_t stream = PyLong_AsUnsignedLongLong(told);
  Py_DECREF(told);
  if (PyErr_Occurred()) return -1;
  int status;
  Py_BEGIN_ALLOW_THREADS
  status = call->launch(call->function, call->grid[0], call->grid[1], call->grid[2],
                        call->threads, 1, 1, call->shared, (void *)stream, parameters, NULL);
  Py_END_ALLOW_THREADS
  return status == 0;
}

static PyObject *formed(Call *call, PyObject **results) {
  Py_ssize_t num_results = PyTuple_GET_SIZE(call->makers);
  if (call->form == NOTHING) Py_RETURN_NONE;
  if (call->form == ONE) return Py_NewRef(results[0]);
  PyObject *made = call->form == LIST ? PyList_New(num_results) : PyTuple_New(num_results);
  for (Py_ssize_t i = 0; made && i < num_results; i++) {
    if (call->form == LIST) PyList_SET_ITEM(made, i, Py_NewRef(results[i]));
    else PyTuple_SET_ITEM(made, i, Py_NewRef(results[i]));
  }
  return made;
}

static PyObject *again(PyObject *self, PyObject *const *arguments, size_t flags, PyObject *names) {
  Call *call = (Call *)self;
  PyObject *results[MOST] = {NULL}, *made = NULL;
  if (names || PyVectorcall_NARGS(flags) != PyTuple_GET_SIZE(call->expected))
    Py_RETURN_NOTIMPLEMENTED;
  int status = is_alike(call, arguments);
  if (status > 0) status = make_results(call, results);
  if (status > 0) status = launch(call, arguments, results);
  if (status > 0) made = formed(call, results);
  else if (status == 0) made = Py_NewRef(Py_NotImplemented);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call->makers); i++) Py_XDECREF(results[i]);
  return made;
}

static void forget(PyObject *self) {
  Py_XDECREF(((Call *)self)->keep);
  PyObject_Free(self);
}

static PyTypeObject CallType = {
  PyVarObject_HEAD_INIT(NULL, 0)
  .tp_name = "kprof.kernels.Call",
  .tp_basicsize = sizeof(Call),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
  .tp_vectorcall_offset = offsetof(Call, vectorcall),
  .tp_call = PyVectorcall_Call,
  .tp_dealloc = forget,
};

static PyObject *prepare(PyObject *module, PyObject *arguments) {
  unsigned long long launch, function;
  const char *values, *places, *offsets;
  Py_ssize_t num_bytes, num_places, num_offsets;
  Call *call = PyObject_New(Call, &CallType);
  if (!call) return NULL;
  call->keep = NULL;
  call->vectorcall = again;
  if (!PyArg_ParseTuple(
          arguments, "KK(III)IIy#y#y#OOOOO!O!O!OO!i", &launch, &function, &call->grid[0],
          &call->grid[1], &call->grid[2], &call->threads, &call->shared, &values, &num_bytes,
          &places, &num_places, &offsets, &num_offsets, &call->data_ptr, &call->device,
          &call->current_device, &call->current_stream, &PyTuple_Type, &call->expected,
          &PyTuple_Type, &call->quiet, &PyTuple_Type, &call->hooks, &call->check, &PyTuple_Type,
          &call->makers, &call->form)) {
    Py_DECREF(call);
    return NULL;
  }
  if (num_places > MOST || num_bytes != 8 * num_places || num_offsets != num_places ||
      PyTuple_GET_SIZE(call->expected) > MOST || PyTuple_GET_SIZE(call->makers) > MOST) {
    Py_DECREF(call);
    PyErr_SetString(PyExc_ValueError, "too many parameters, arguments or results");
    return NULL;
  }
  call->launch = (launch_t)launch;
  call->function = (void *)function;
  call->num_parameters = (int)num_places;
  memcpy(call->values, values, num_bytes);
  memcpy(call->places, places, num_places);
  memcpy(call->offsets, offsets, num_places);
  call->keep = Py_NewRef(arguments);
  return (PyObject *)call;
}

static PyMethodDef methods[] = {{"prepare", prepare, METH_VARARGS, NULL}, {NULL}};
static struct PyModuleDef definition = {
  PyModuleDef_HEAD_INIT, .m_name = "kprof_repeated", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_kprof_repeated(void) {
  return PyType_Ready(&CallType) < 0 ? NULL : PyModule_Create(&definition);
}
"""
