//! Received bytes that are not handed on yet.

use crate::client::ConnectionError;
use crate::codec::{HEAD_BYTES, MAX_TABLE_BYTES};
use crate::protocol::MAX_PAGES;
use crate::socket::{self, Wait};
use crate::tls::{Session, TlsError};
use crate::window::WindowLimits;
use hecaton_memory::PAGE_SIZE;
use std::io;
use std::os::fd::BorrowedFd;

/// Most bytes that one `recv` asks for: small enough to be still in the cache when the pages are
/// handed on, large enough that the call itself costs nothing per page.
pub(crate) const RECEIVE_BYTES: usize = 256 << 10;

/// The buffer holds whatever the window lets the donor send, so that who submits a request can
/// always take in the answers that stand between it and the donor's next receive. It begins at its
/// start again whenever it can: in quiet times only the first pages of it are ever touched.
pub(crate) struct Inbox {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(crate) fn new(window: &WindowLimits) -> Inbox {
        let payload_bytes = window.payload_bytes.max(MAX_PAGES * PAGE_SIZE);
        let heads = window.requests * (HEAD_BYTES + MAX_PAGES * 4);
        let capacity = payload_bytes + heads + MAX_TABLE_BYTES + PAGE_SIZE;
        // Fresh memory of this size is mapped, not touched.
        let buffer = vec![0; capacity.max(RECEIVE_BYTES)].into_boxed_slice();
        Inbox { buffer, start: 0, end: 0 }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[self.start..self.end]
    }

    pub(crate) fn has_space(&self) -> bool {
        self.end < self.buffer.len()
    }

    pub(crate) fn consume(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// Moves what is left, less than a page or a table, to the buffer's start.
    pub(crate) fn compact(&mut self) {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
    }

    /// One receive, without waiting. Says how many bytes came from the socket; none is not the end
    /// of the stream.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        session: Option<&mut Session>,
    ) -> Result<usize, ConnectionError> {
        let Some(session) = session else {
            let until = self.buffer.len().min(self.end + RECEIVE_BYTES);
            return match socket::receive(socket, &mut self.buffer[self.end..until], Wait::No) {
                Ok(0) => Err(ConnectionError::Closed),
                Ok(count) => {
                    self.end += count;
                    Ok(count)
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                Err(error) => Err(error.into()),
            };
        };
        if !self.has_space() {
            // More than the window lets it send.
            return Err(ConnectionError::Closed);
        }
        match session.receive(socket, &mut self.buffer[self.end..], Wait::No) {
            Ok(received) => {
                self.end += received.plain;
                Ok(received.raw)
            }
            Err(TlsError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error.into()),
        }
    }
}
