//! Nothing: the tests and the example are the package.
