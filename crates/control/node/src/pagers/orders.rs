//! Sends requests to running pagers, on their control sockets.
//!
//! Each request is one line of JSON, and so is its answer.

use super::{PagerError, Pagers, parts};
use crate::message::{Place, ResizeLocal};
use hecaton_pager::{MIN_LOCAL_BYTES, Placement};
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for an answer. The pager itself allows 30 s for evictions.
const PATIENCE: Duration = Duration::from_secs(40);

const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// Why a pager did not execute a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// The node has no such consumer.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// Local memory of both parts changes together only.
    #[error("`{0}` is the shared memory of `{1}`; change the local memory of `{1}`")]
    Part(String, String),
    /// The pager refused.
    #[error("the pager of `{consumer}` refused: {reason}")]
    Refused {
        consumer: String,
        /// The pager's words.
        reason: String,
    },
    /// The pager is restarting, or does not answer.
    #[error("the pager of `{consumer}` does not answer; try again in a moment")]
    Io {
        consumer: String,
        /// The failed call.
        source: io::Error,
    },
}

impl Pagers {
    /// Changes a consumer's local memory.
    pub(crate) fn resize_local(&self, wish: &ResizeLocal) -> Result<(), ControlError> {
        let of = self.with(&wish.consumer, |pager| pager.config.shared_memory_of.clone())?;
        if let Some(of) = of {
            return Err(ControlError::Part(wish.consumer.clone(), of.consumer));
        }
        match self.pair(&wish.consumer) {
            None => self.resize_pager(&wish.consumer, wish.bytes),
            Some(_) if wish.bytes < MIN_LOCAL_BYTES => Err(ControlError::Refused {
                consumer: wish.consumer.clone(),
                reason: format!("{} bytes are below the minimum of {MIN_LOCAL_BYTES}", wish.bytes),
            }),
            Some(_) => {
                self.with(&wish.consumer, |pager| pager.config.divided_bytes = Some(wish.bytes))?;
                self.resize_pair(&wish.consumer, |pair| {
                    let before = pair.own_bytes + pair.shared_bytes;
                    let shared = parts::scaled(pair.shared_bytes, before, wish.bytes);
                    (wish.bytes - shared, shared)
                })
            }
        }
    }

    /// Changes the local memory of one pager.
    pub(super) fn resize_pager(&self, name: &str, bytes: u64) -> Result<(), ControlError> {
        let request = json!({ "resize_local": { "bytes": bytes } });
        // The table first: if the pager is killed meanwhile, its successor starts with the new
        // size. If the pager refuses, the old size is restored.
        let before = self.report(name)?.local_bytes;
        self.with(name, |pager| pager.set_local(bytes))?;
        let done = self.ask(name, &request);
        if let Err(ControlError::Refused { .. }) = &done {
            self.with(name, |pager| pager.set_local(before))?;
        }
        done
    }

    /// Changes the donors that may hold a consumer's memory.
    pub(crate) fn place(&self, wish: Place) -> Result<(), ControlError> {
        let Place { consumer, donors, ranges } = wish;
        let shared = self.pair(&consumer).map(|pair| pair.shared);
        for name in [consumer].into_iter().chain(shared) {
            let before = self.placement(&name)?;
            let (donors, ranges) = (donors.clone(), ranges.clone());
            let placement = Placement { copies: before.copies, donors, ranges };
            // The table first, as for local memory.
            self.set_placement(&name, placement.clone())?;
            let done = self.ask(&name, &json!({ "place": placement }));
            if let Err(ControlError::Refused { .. }) = &done {
                self.set_placement(&name, before)?;
            }
            done?;
        }
        Ok(())
    }

    /// Starts to detach a machine: all its memory comes back to this host.
    pub(crate) fn detach(&self, consumer: &str) -> Result<(), ControlError> {
        self.ask(consumer, &json!("detach"))
    }

    fn ask(&self, consumer: &str, request: &Value) -> Result<(), ControlError> {
        let mut socket = self.pager_socket(consumer)?.into_os_string();
        socket.push(".ctl");
        let answer = exchange(&PathBuf::from(socket), request);
        let answer =
            answer.map_err(|source| ControlError::Io { consumer: consumer.to_owned(), source })?;
        match answer.get("refused").and_then(Value::as_str) {
            Some(reason) => Err(ControlError::Refused {
                consumer: consumer.to_owned(),
                reason: reason.to_owned(),
            }),
            None => Ok(()),
        }
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
