//! The traces of this project: see `traces/README.md` for what was recorded and how.

use super::{
    Program,
    trace::{TraceError, decode},
};

macro_rules! traces {
    ($($name:literal),*) => {
        [$(($name, include_bytes!(concat!("../../traces/", $name, ".trace")).as_slice())),*]
    };
}

/// The recorded programs, ready for [`super::table`]. They become part of the binary that calls
/// this, about 1.9 MB.
///
/// # Errors
///
/// If a trace in the repository is damaged.
pub fn recorded() -> Result<Vec<Program>, TraceError> {
    traces!["sort", "quicksort", "heat", "python", "sqlite", "compile", "xz", "redis"]
        .into_iter()
        .map(|(name, bytes)| Ok(Program::new(name, &decode(bytes)?)))
        .collect()
}
