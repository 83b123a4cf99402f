//! Sends requests to a running pager's control socket: one line each way.

use crate::pagers::{PagerError, Pagers};
use crate::socket::message::{Place, ResizeLocal};
use hecaton_pager::Placement;
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a pager may take to answer: longer than its own timeout for an eviction.
const PATIENCE: Duration = Duration::from_secs(40);

/// Longest answer that is read.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// Why a pager did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// There is no such consumer.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// The pager refused.
    #[error("the pager of `{consumer}` refused: {reason}")]
    Refused {
        /// The consumer of the pager.
        consumer: String,
        /// The reason that the pager gave.
        reason: String,
    },
    /// The pager is being restarted, or does not answer.
    #[error("the pager of `{consumer}` does not answer; try again in a moment")]
    Io {
        /// The consumer of the pager.
        consumer: String,
        /// The error of the socket.
        source: io::Error,
    },
}

/// Changes a consumer's local memory.
pub(crate) fn resize_local(pagers: &Pagers, wish: &ResizeLocal) -> Result<(), ControlError> {
    let request = json!({ "resize_local": { "bytes": wish.bytes } });
    // Record the size before asking: if the pager dies meanwhile, its successor starts with the new
    // size. If the pager refuses, restore the old size.
    let before = pagers.report(&wish.consumer)?.local_bytes;
    pagers.set_local_bytes(&wish.consumer, wish.bytes)?;
    let done = ask(pagers, &wish.consumer, &request);
    if let Err(ControlError::Refused { .. }) = &done {
        pagers.set_local_bytes(&wish.consumer, before)?;
    }
    done
}

/// Changes the donors that may hold a consumer's memory.
pub(crate) fn place(pagers: &Pagers, wish: Place) -> Result<(), ControlError> {
    let before = pagers.placement(&wish.consumer)?;
    let Place { consumer, donors, ranges } = wish;
    let placement = Placement { copies: before.copies, donors, ranges };
    // As with the local memory: a successor starts with the new donors.
    pagers.set_placement(&consumer, placement.clone())?;
    let done = ask(pagers, &consumer, &json!({ "place": placement }));
    if let Err(ControlError::Refused { .. }) = &done {
        pagers.set_placement(&consumer, before)?;
    }
    done
}

/// Starts to fetch all of a machine's memory back to this host.
pub(crate) fn detach(pagers: &Pagers, consumer: &str) -> Result<(), ControlError> {
    ask(pagers, consumer, &json!("detach"))
}

fn ask(pagers: &Pagers, consumer: &str, request: &Value) -> Result<(), ControlError> {
    let mut socket = pagers.pager_socket(consumer)?.into_os_string();
    socket.push(".ctl");
    let answer = exchange(&PathBuf::from(socket), request);
    let answer =
        answer.map_err(|source| ControlError::Io { consumer: consumer.to_owned(), source })?;
    match answer.get("refused").and_then(Value::as_str) {
        Some(reason) => {
            Err(ControlError::Refused { consumer: consumer.to_owned(), reason: reason.to_owned() })
        }
        None => Ok(()),
    }
}

fn exchange(socket: &Path, request: &Value) -> io::Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    writeln!(stream, "{request}")?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_ANSWER_BYTES)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}
