//! Has the programs' shared memory kept: starts a keeper ([`hecaton_shared`]) when a program first
//! asks for a file, and shares local memory with it.
//!
//! A program asks at the pager's socket with the suffix `.files`, which the keeper inherits. The
//! node holds it, too: a question outlives pager and keeper.
//!
//! | module | does |
//! |---|---|
//! | [`keeping`] | starts keepers, and does what they say |
//! | [`division`] | divides local memory between the programs' own pages and shared ones |
//! | [`unmap`] | drops pages of files from page tables of programs |

pub(crate) mod division;
pub(crate) mod keeping;
pub(crate) mod unmap;

use crate::config::PagerConfig;
use crate::error::PagerError;
use hecaton_uffd::files::SOCKET_SUFFIX;
use rustix::net::SocketType;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// Where programs ask for shared memory.
pub(crate) fn socket(config: &PagerConfig) -> PathBuf {
    let mut path = config.socket.as_os_str().to_owned();
    path.push(SOCKET_SUFFIX);
    path.into()
}

/// Removes the keeper's files: the consumer has ended. The record's disk is a mount of the node's.
pub(crate) fn remove(config: &PagerConfig) {
    let socket = socket(config);
    for suffix in ["", ".record", ".record.note"] {
        let mut path = socket.clone().into_os_string();
        path.push(suffix);
        let _ = std::fs::remove_file(path);
    }
}

/// Listens there. `None` if this host or consumer has no shared memory in the pool: a machine, or a
/// node that may not mount.
pub(crate) fn listen(config: &PagerConfig) -> Result<Option<RawFd>, PagerError> {
    if config.guest.is_some() || config.node.is_none() || !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    crate::listen(&socket(config), SocketType::SEQPACKET).map(Some)
}
