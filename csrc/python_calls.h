// Functions and classes of C++ as Python calls them: arguments by place or by name, none left out.
//
// A module's table lists `function<&f, kNames>`, a class's table `method<&C::f, kNames>`; kNames are the parameters'
// names. Parameters may be numbers, bool, strings, pairs, arrays and vectors of these, and objects of classes that
// `add_class` has made. Exceptions become Python's.
//
// Addresses and numbers are all that the modules take, so this is enough, and it compiles in a tenth of the time that a
// library for any C++ takes. Python's C interface is the only thing that it needs.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace nanovllm::python {

struct Raised {};  // thrown where Python's error is set

[[noreturn]] inline void raise(PyObject* type, const std::string& what) {
    PyErr_SetString(type, what.c_str());
    throw Raised{};
}

// Within a catch block: its exception as Python's error.
inline void set_error() noexcept {
    try {
        throw;
    } catch (const Raised&) {
    } catch (const std::out_of_range& error) {
        PyErr_SetString(PyExc_IndexError, error.what());
    } catch (const std::logic_error& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

// Releases the GIL while it lives.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() { PyEval_RestoreThread(state_); }
    WithoutGil(const WithoutGil&) = delete;

  private:
    PyThreadState* state_;
};

// Owns a new reference.
class Owned {
  public:
    explicit Owned(PyObject* object) : object_(object) {
        if (object == nullptr) throw Raised{};
    }
    Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    ~Owned() { Py_XDECREF(object_); }

    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }

  private:
    PyObject* object_;
};

// ---- classes: Python's objects share those of C++

template <class T>
struct Object {
    PyObject_HEAD
    std::shared_ptr<T> value;
};

template <class T>
inline PyTypeObject* type_of = nullptr;  // set by add_class when the module is imported

// What an object of T's class holds, null for other objects.
template <class T>
const std::shared_ptr<T>* instance(PyObject* object) {
    return Py_TYPE(object) == type_of<T> ? &reinterpret_cast<Object<T>*>(object)->value : nullptr;
}

template <class T>
PyObject* new_object(std::shared_ptr<T> value) {
    PyObject* const object = type_of<T>->tp_alloc(type_of<T>, 0);
    if (object == nullptr) throw Raised{};
    new (&reinterpret_cast<Object<T>*>(object)->value) std::shared_ptr<T>(std::move(value));
    return object;
}
template <class T>
PyObject* new_object(T value) {
    return new_object(std::make_shared<T>(std::move(value)));
}

template <class T>
void delete_object(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    reinterpret_cast<Object<T>*>(self)->value.~shared_ptr();
    type->tp_free(self);
    Py_DECREF(type);
}

// ---- arguments

[[noreturn]] inline void refuse(PyObject* object, const std::string& wanted) {
    raise(PyExc_TypeError, "An argument must be " + wanted + ", got " + Py_TYPE(object)->tp_name + ".");
}

inline int64_t integer(PyObject* object, int64_t least, int64_t most) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw Raised{};
    if (value < least || value > most)
        raise(PyExc_OverflowError, "An integer must lie between " + std::to_string(least) + " and " +
                                       std::to_string(most) + ", got " + std::to_string(value) + ".");
    return value;
}

inline std::string_view text(PyObject* object) {
    Py_ssize_t size = 0;
    const char* const bytes = PyUnicode_AsUTF8AndSize(object, &size);
    if (bytes == nullptr) throw Raised{};
    return {bytes, size_t(size)};
}

inline PyObject* const* items(PyObject* object, Py_ssize_t count) {
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != count)
        refuse(object, "a tuple of " + std::to_string(count));
    return &PyTuple_GET_ITEM(object, 0);
}

// What a parameter of the type T, without const and reference, is given for an object.
template <class T, class = void>
struct Argument {
    static T& of(PyObject* object) { return *Argument<std::shared_ptr<T>>::of(object); }
};

template <class T>
struct Argument<std::shared_ptr<T>> {
    static const std::shared_ptr<T>& of(PyObject* object) {
        const std::shared_ptr<T>* const value = instance<T>(object);
        if (value == nullptr) refuse(object, std::string("a ") + type_of<T>->tp_name);
        return *value;
    }
};

template <class T>
struct Argument<T, std::enable_if_t<std::is_integral_v<T>>> {
    static T of(PyObject* object) {
        using Limits = std::numeric_limits<T>;
        constexpr bool kWide = std::is_unsigned_v<T> && sizeof(T) == sizeof(int64_t);
        return T(integer(object, Limits::min(), kWide ? INT64_MAX : int64_t(Limits::max())));
    }
};

template <>
struct Argument<bool> {
    static bool of(PyObject* object) {
        const int truth = PyObject_IsTrue(object);
        if (truth < 0) throw Raised{};
        return truth != 0;
    }
};

template <>
struct Argument<float> {
    static float of(PyObject* object) {
        const double value = PyFloat_AsDouble(object);
        if (value == -1 && PyErr_Occurred()) throw Raised{};
        return float(value);
    }
};

template <>
struct Argument<std::string_view> {
    static std::string_view of(PyObject* object) { return text(object); }
};

template <>
struct Argument<std::string> {
    static std::string of(PyObject* object) { return std::string(text(object)); }
};

template <>
struct Argument<PyObject*> {
    static PyObject* of(PyObject* object) { return object; }
};

template <class A, class B>
struct Argument<std::pair<A, B>> {
    static std::pair<A, B> of(PyObject* object) {
        PyObject* const* const both = items(object, 2);
        return {Argument<A>::of(both[0]), Argument<B>::of(both[1])};
    }
};

template <class T, size_t size>
struct Argument<std::array<T, size>> {
    static std::array<T, size> of(PyObject* object) {
        PyObject* const* const all = items(object, size);
        std::array<T, size> values;
        for (size_t i = 0; i < size; ++i) values[i] = Argument<T>::of(all[i]);
        return values;
    }
};

template <class T>
struct Argument<std::vector<T>> {
    static std::vector<T> of(PyObject* object) {
        const Owned sequence(PySequence_Fast(object, "An argument must be a sequence."));
        std::vector<T> values;
        values.reserve(size_t(PySequence_Fast_GET_SIZE(sequence.get())));
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.get()); ++i)
            values.push_back(Argument<T>::of(PySequence_Fast_GET_ITEM(sequence.get(), i)));
        return values;
    }
};

// ---- results

inline Owned result(bool value) { return Owned(PyBool_FromLong(value)); }
inline Owned result(int value) { return Owned(PyLong_FromLong(value)); }
inline Owned result(int64_t value) { return Owned(PyLong_FromLongLong(value)); }
inline Owned result(uint64_t value) { return Owned(PyLong_FromUnsignedLongLong(value)); }
inline Owned result(double value) { return Owned(PyFloat_FromDouble(value)); }
inline Owned result(const std::string& value) {
    return Owned(PyUnicode_FromStringAndSize(value.data(), Py_ssize_t(value.size())));
}
inline Owned result(const std::optional<std::string>& value) {
    return value ? result(*value) : Owned(Py_NewRef(Py_None));
}
inline Owned result(const std::vector<std::string>& values) {
    Owned list(PyList_New(Py_ssize_t(values.size())));
    for (size_t i = 0; i < values.size(); ++i) PyList_SET_ITEM(list.get(), Py_ssize_t(i), result(values[i]).release());
    return list;
}
template <class A, class B>
Owned result(const std::pair<A, B>& values) {
    return Owned(PyTuple_Pack(2, result(values.first).get(), result(values.second).get()));
}
template <class T>
Owned result(const std::shared_ptr<T>& value) {
    return Owned(new_object(value));
}

// ---- calls

template <class... Name>
constexpr std::array<const char*, sizeof...(Name)> names(Name... name) {
    return {name...};
}
constexpr auto kNoNames = names();

// Puts the arguments of a call in the order of the names.
inline void place(const char* const* names, size_t count, PyObject* const* given, size_t positional, PyObject* keywords,
                  PyObject** placed) {
    if (positional > count) raise(PyExc_TypeError, "There are at most " + std::to_string(count) + " arguments.");
    for (size_t i = 0; i < count; ++i) placed[i] = i < positional ? given[i] : nullptr;
    const size_t named = keywords ? size_t(PyTuple_GET_SIZE(keywords)) : 0;
    for (size_t k = 0; k < named; ++k) {
        const char* const name = text(PyTuple_GET_ITEM(keywords, Py_ssize_t(k))).data();
        size_t at = positional + k;  // most callers keep the order
        if (at >= count || std::strcmp(names[at], name) != 0)
            for (at = 0; at < count && std::strcmp(names[at], name) != 0;) ++at;
        if (at == count) raise(PyExc_TypeError, std::string("There is no argument ") + name + ".");
        if (placed[at]) raise(PyExc_TypeError, std::string("The argument ") + name + " is given twice.");
        placed[at] = given[positional + k];
    }
    for (size_t i = 0; i < count; ++i)
        if (!placed[i]) raise(PyExc_TypeError, std::string("The argument ") + names[i] + " is missing.");
}

template <class T>
using ArgumentOf = Argument<std::remove_cv_t<std::remove_reference_t<T>>>;

// A function's parameters; the first one of a member function is its object.
template <class F>
struct Signature;
template <class R, class... A>
struct Signature<R (*)(A...)> {
    static constexpr size_t kCount = sizeof...(A);

    template <class F, size_t... i>
    static R call(F f, PyObject* const* values, std::index_sequence<i...>) {
        (void)values;  // where there are no parameters
        return f(ArgumentOf<A>::of(values[i])...);
    }
};
template <class R, class C, class... A>
struct Signature<R (C::*)(A...)> {
    static constexpr size_t kCount = sizeof...(A) + 1;

    template <class F, size_t self, size_t... i>
    static R call(F f, PyObject* const* values, std::index_sequence<self, i...>) {
        return (ArgumentOf<C>::of(values[self]).*f)(ArgumentOf<A>::of(values[i])...);
    }
};
template <class R, class C, class... A>
struct Signature<R (C::*)(A...) const> : Signature<R (C::*)(A...)> {};

// Calls f with arguments whose names are in `names`, behind `self` if there is one.
template <auto f, const auto& names>
decltype(auto) call(PyObject* self, PyObject* const* given, size_t positional, PyObject* keywords) {
    using S = Signature<decltype(f)>;
    const size_t own = self ? 1 : 0;
    PyObject* values[S::kCount + 1] = {self};
    place(names.data(), names.size(), given, positional, keywords, values + own);
    return S::call(f, values, std::make_index_sequence<S::kCount>());
}

template <auto f, const auto& names, bool is_method>
PyObject* entry(PyObject* self, PyObject* const* given, Py_ssize_t positional, PyObject* keywords) noexcept {
    using S = Signature<decltype(f)>;
    static_assert(S::kCount == names.size() + is_method, "each parameter has a name, but for the object of a method");
    const auto run = [&]() -> decltype(auto) {
        return call<f, names>(is_method ? self : nullptr, given, size_t(positional), keywords);
    };
    try {
        if constexpr (!std::is_void_v<decltype(run())>) return result(run()).release();
        run();
        return Py_NewRef(Py_None);
    } catch (...) {
        set_error();
        return nullptr;
    }
}

template <auto f, const auto& names, bool is_method>
PyMethodDef method_entry(const char* name, const char* doc) {
    void (*const any)() = reinterpret_cast<void (*)()>(&entry<f, names, is_method>);
    return {name, reinterpret_cast<PyCFunction>(any), METH_FASTCALL | METH_KEYWORDS, doc};
}

// Lines of the table of a module, which ends with {}.
template <auto f, const auto& names = kNoNames>
PyMethodDef function(const char* name, const char* doc = nullptr) {
    return method_entry<f, names, false>(name, doc);
}
// Lines of the table of a class: f is a member function, or a function whose first parameter is the object.
template <auto f, const auto& names = kNoNames>
PyMethodDef method(const char* name, const char* doc = nullptr) {
    return method_entry<f, names, true>(name, doc);
}

// ---- modules

// What a class is called with, as functions are given it: values by place, then those by name, and these names.
struct Given {
    std::vector<PyObject*> values;
    Owned keys;

    Given(PyObject* positional, PyObject* keywords) : keys(PyTuple_New(keywords ? PyDict_GET_SIZE(keywords) : 0)) {
        values.reserve(size_t(PyTuple_GET_SIZE(positional) + PyTuple_GET_SIZE(keys.get())));
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positional); ++i) values.push_back(PyTuple_GET_ITEM(positional, i));
        PyObject *key, *value;
        for (Py_ssize_t at = 0, i = 0; keywords && PyDict_Next(keywords, &at, &key, &value); ++i) {
            PyTuple_SET_ITEM(keys.get(), i, Py_NewRef(key));
            values.push_back(value);
        }
    }
};

template <auto make, const auto& names>
PyObject* construct(PyTypeObject*, PyObject* positional, PyObject* keywords) noexcept {
    try {
        const Given given(positional, keywords);
        return new_object(call<make, names>(nullptr, given.values.data(), size_t(PyTuple_GET_SIZE(positional)),
                                            given.keys.get()));
    } catch (...) {
        set_error();
        return nullptr;
    }
}

inline void add(PyObject* module, const char* name, PyObject* object) {
    const Owned owned(object);
    if (PyModule_AddObjectRef(module, name, object) < 0) throw Raised{};
}

// Names and tables must live as long as the process.
inline void add_functions(PyObject* module, PyMethodDef* table) {
    if (PyModule_AddFunctions(module, table) < 0) throw Raised{};
}

template <class T>
void add_type(PyObject* module, const char* full_name, PyMethodDef* methods, newfunc construct) {
    PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(&delete_object<T>)},
        {Py_tp_methods, methods},
        {construct ? Py_tp_new : 0, reinterpret_cast<void*>(construct)},
        {0, nullptr},
    };
    const unsigned flags = Py_TPFLAGS_DEFAULT | (construct ? 0 : Py_TPFLAGS_DISALLOW_INSTANTIATION);
    PyType_Spec spec{full_name, int(sizeof(Object<T>)), 0, flags, slots};
    Owned type(PyType_FromSpec(&spec));
    type_of<T> = reinterpret_cast<PyTypeObject*>(type.get());
    add(module, std::strrchr(full_name, '.') + 1, type.release());
    Py_INCREF(type_of<T>);
}

inline PyMethodDef kNoMethods[] = {{}};

// A class for T, which `make` returns or points to.
template <class T, auto make, const auto& names = kNoNames>
void add_class(PyObject* module, const char* full_name, PyMethodDef* methods = kNoMethods) {
    add_type<T>(module, full_name, methods, &construct<make, names>);
}

// A class whose objects come from functions alone.
template <class T>
void add_class(PyObject* module, const char* full_name, PyMethodDef* methods) {
    add_type<T>(module, full_name, methods, nullptr);
}

// What the import of a module returns: the module, to which `fill` has added what is in it.
template <class Fill>
PyObject* import_module(PyModuleDef& definition, const Fill& fill) noexcept {
    try {
        Owned module(PyModule_Create(&definition));
        fill(module.get());
        return module.release();
    } catch (...) {
        set_error();
        return nullptr;
    }
}

}  // namespace nanovllm::python
