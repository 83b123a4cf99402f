//! How many files a daemon may have open.
//!
//! The usual limit of 1024 is for programs that use `select`. A donor has a descriptor for each
//! connection, a pager some for each process of its program; theirs is the hard limit.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises this process's limit, and that of the children it will start, as far as it may be.
pub(crate) fn raise_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}
