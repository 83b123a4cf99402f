//! Lists the reasons for which a pager fails.

use crate::config::MIN_LOCAL_BYTES;
use hecaton_space::SpaceError;
use std::path::PathBuf;

/// Why a pager ends otherwise than in peace.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// Less local memory than batches need.
    #[error("{0} bytes of local memory are too few: a pager works with {MIN_LOCAL_BYTES} or more")]
    LocalTooSmall(u64),
    /// A socket that cannot be listened on.
    #[error("cannot listen on {path}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The process was not started by a node.
    #[error("this command is started by `hecaton node`, with a socket to it as standard input")]
    NotStarted,
    /// The pool cannot be used.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// The consumer was ended, because its memory could not be kept.
    #[error("the program was ended: {0}")]
    ConsumerEnded(String),
    /// The kernel refuses something that a pager needs.
    #[error(transparent)]
    System(#[from] std::io::Error),
}
