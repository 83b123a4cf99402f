//! Says where a world has its files.

use std::{env, path::PathBuf};

/// The environment variable that says to a process which directory its world has.
pub(super) const DIR: &str = "HECATON_E2E_DIR";

/// The directory of this process's world, if it is in one.
pub(super) fn dir_of_any() -> Option<PathBuf> {
    env::var_os(DIR).map(PathBuf::from)
}

/// The directory of this process's world.
pub(crate) fn dir() -> PathBuf {
    dir_of_any().expect("tests run in a world")
}
