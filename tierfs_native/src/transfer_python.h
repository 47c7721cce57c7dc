/* What the sources of the extension module tierfs_native._transfer share. */
#pragma once

#include <Python.h>

extern PyType_Spec tierfs_getter_spec;
