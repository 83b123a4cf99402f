//! The requests of one client.
//!
//! Several threads serve a connection, and take turns at reading from it: whoever has read a request
//! lets the next one read, does what is asked, and answers. So a request changes hands nowhere, a
//! client with one request at a time keeps two threads awake at most, and as many requests are under
//! way as there are threads. Further ones wait in the socket.

use super::stream::Stream;
use super::wire::{
    Command, Malformed, Request, Session, allocation, chunk, errno, flag, only_chunk, simple_reply,
};
use crate::extents::Extent;
use crate::volume::{Contents, Volume};
use crate::{BlockError, nbd::wire::MAX_PAYLOAD};
use std::io::{self, BufRead, BufReader, Read};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::Scope;

/// Most requests of a client that are under way at a time.
const MAX_THREADS: usize = 16;

/// Bytes of data that a client's requests under way may have, together.
const MAX_BYTES: usize = MAX_PAYLOAD as usize;

/// A thread keeps so much of its buffer for the next request.
const KEPT_BYTES: usize = 1 << 20;

/// Extents that one answer names at most; a client asks for the rest again.
const MAX_EXTENTS: usize = 4096;

/// What is read from the socket at a time, as long as requests are small.
const READ_BYTES: usize = 32 << 10;

/// A client that has chosen the volume.
pub(super) struct Connection {
    volume: Arc<Volume>,
    session: Session,
    stream: Stream,
    reading: Mutex<Reading>,
    /// Held while a reply is written.
    writing: Mutex<()>,
    bytes: Budget,
    is_over: AtomicBool,
}

struct Reading {
    stream: BufReader<Stream>,
    /// How many serve the connection.
    threads: usize,
    /// How many of them are doing what was asked.
    busy: usize,
}

/// Why a connection is closed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Connection {
    pub(super) fn new(volume: Arc<Volume>, session: Session, stream: Stream) -> Connection {
        let from = BufReader::with_capacity(READ_BYTES, stream.clone());
        Connection {
            volume,
            session,
            stream,
            reading: Mutex::new(Reading { stream: from, threads: 1, busy: 0 }),
            writing: Mutex::default(),
            bytes: Budget { free: Mutex::new(MAX_BYTES), more: Condvar::new() },
            is_over: AtomicBool::new(false),
        }
    }

    /// Serves until the client has gone, and all that it asked for is done.
    pub(super) fn serve(&self) {
        std::thread::scope(|scope| self.work(scope));
    }

    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let mut buffer = Vec::new();
        while let Some((request, held)) = self.next(scope, &mut buffer) {
            if let Err(error) = self.answer(&request, &mut buffer) {
                self.end(&error.into());
            }
            self.bytes.give_back(held);
            buffer.truncate(KEPT_BYTES);
            buffer.shrink_to(KEPT_BYTES);
            self.reading().busy -= 1;
        }
    }

    /// The next request, with the data of a write in the buffer, and how much of the budget it has.
    fn next<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        buffer: &mut Vec<u8>,
    ) -> Option<(Request, usize)> {
        let mut reading = self.reading();
        if self.is_over.load(Acquire) {
            return None;
        }
        match self.receive(&mut reading.stream, buffer) {
            Ok(Some(received)) => {
                reading.busy += 1;
                if reading.busy == reading.threads && reading.threads < MAX_THREADS {
                    // Without it, fewer are under way at a time.
                    let thread = std::thread::Builder::new().name("nbd".into());
                    if thread.spawn_scoped(scope, || self.work(scope)).is_ok() {
                        reading.threads += 1;
                    }
                }
                Some(received)
            }
            Ok(None) => {
                self.is_over.store(true, Release);
                None
            }
            Err(error) => {
                self.end(&error);
                None
            }
        }
    }

    fn receive(
        &self,
        stream: &mut BufReader<Stream>,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<(Request, usize)>, ConnectionError> {
        if stream.fill_buf()?.is_empty() {
            return Ok(None);
        }
        let mut bytes = [0; Request::BYTES];
        stream.read_exact(&mut bytes)?;
        let request = Request::decode(&bytes)?;
        let length = request.length as usize;
        let held = match request.command {
            Command::Disconnect => return Ok(None),
            Command::Read | Command::Write if length <= MAX_BYTES => length,
            _ => 0,
        };
        self.bytes.take(held);
        if buffer.len() < held {
            buffer.resize(held, 0);
        }
        if request.command == Command::Write {
            stream.read_exact(&mut buffer[..held])?;
        }
        Ok(Some((request, held)))
    }

    fn answer(&self, request: &Request, buffer: &mut [u8]) -> io::Result<()> {
        let Request { command, offset, length, cookie, .. } = *request;
        if let Err(error) = request.check(self.volume.size_bytes(), self.session) {
            return self.refuse(request, error, offset);
        }
        let volume = &self.volume;
        let done = match command {
            Command::Read => {
                let data = &mut buffer[..length as usize];
                return match volume.read(offset, data) {
                    Ok(contents) => self.give(request, data, contents),
                    Err((at, error)) => self.refuse(request, errno_of(&error), at),
                };
            }
            Command::BlockStatus => {
                let most = if request.flags & flag::REQ_ONE == 0 { MAX_EXTENTS } else { 1 };
                return match volume.extents(offset, length.into(), most) {
                    Ok(extents) => self.tell(cookie, &extents),
                    Err(error) => self.refuse(request, errno_of(&error), offset),
                };
            }
            Command::Write => volume.write(offset, &buffer[..length as usize]),
            Command::Trim => volume.trim(offset, length.into()),
            Command::WriteZeroes => {
                let allocate = request.flags & flag::NO_HOLE != 0;
                volume.write_zeroes(offset, length.into(), allocate)
            }
            Command::Flush => volume.flush(),
            Command::Disconnect | Command::Unknown(_) => unreachable!("not answered, or refused"),
        };
        let is_kept = request.flags & flag::FUA == 0 || command == Command::Flush;
        match done.and_then(|()| if is_kept { Ok(()) } else { volume.flush() }) {
            Ok(()) => self.send(&[&simple_reply(cookie, 0)]),
            Err(error) => self.refuse(request, errno_of(&error), offset),
        }
    }

    /// Answers a read.
    fn give(&self, request: &Request, data: &[u8], contents: Contents) -> io::Result<()> {
        let Request { cookie, offset, length, .. } = *request;
        let at = offset.to_be_bytes();
        match (self.session.structured, contents) {
            (false, _) => self.send(&[&simple_reply(cookie, 0), data]),
            (true, Contents::Data) => {
                self.send(&[&only_chunk(cookie, chunk::OFFSET_DATA, 8 + length), &at, data])
            }
            (true, Contents::Hole) => {
                let head = only_chunk(cookie, chunk::OFFSET_HOLE, 12);
                self.send(&[&head, &at, &length.to_be_bytes()])
            }
        }
    }

    /// Answers which bytes are stored.
    fn tell(&self, cookie: u64, extents: &[Extent]) -> io::Result<()> {
        let mut told = allocation::ID.to_be_bytes().to_vec();
        for extent in extents {
            let length = u32::try_from(extent.bytes).expect("no longer than the request");
            let state = match extent.contents {
                Contents::Data => 0,
                Contents::Hole => allocation::HOLE | allocation::ZERO,
            };
            told.extend_from_slice(&length.to_be_bytes());
            told.extend_from_slice(&state.to_be_bytes());
        }
        self.send(&[&only_chunk(cookie, chunk::BLOCK_STATUS, told.len() as u32), &told])
    }

    /// Answers that a request failed; at which byte, if it is a read that has.
    fn refuse(&self, request: &Request, error: u32, at: u64) -> io::Result<()> {
        let cookie = request.cookie;
        let is_structured = match request.command {
            Command::Read => self.session.structured,
            // Never answered otherwise.
            Command::BlockStatus => self.session.allocation,
            _ => false,
        };
        if !is_structured {
            return self.send(&[&simple_reply(cookie, error)]);
        }
        // The error, and how long a text follows.
        let mut what = [0; 6];
        what[..4].copy_from_slice(&error.to_be_bytes());
        match error {
            _ if request.command == Command::BlockStatus => {
                self.send(&[&only_chunk(cookie, chunk::ERROR, 6), &what])
            }
            errno::EINVAL => self.send(&[&only_chunk(cookie, chunk::ERROR, 6), &what]),
            _ => {
                let head = only_chunk(cookie, chunk::ERROR_OFFSET, 14);
                self.send(&[&head, &what, &at.to_be_bytes()])
            }
        }
    }

    fn send(&self, parts: &[&[u8]]) -> io::Result<()> {
        let _turn = self.writing.lock().expect("no thread panics as it writes");
        self.stream.send(parts)
    }

    /// Says once why the connection is closed, and closes it.
    fn end(&self, error: &ConnectionError) {
        if !self.is_over.swap(true, Release) {
            let volume = self.volume.name();
            tracing::warn!(volume, %error, "a client's connection is closed");
        }
        // Fails when it is closed, which is as well.
        let _ = rustix::net::shutdown(self.stream.socket(), rustix::net::Shutdown::Both);
    }

    fn reading(&self) -> std::sync::MutexGuard<'_, Reading> {
        self.reading.lock().expect("no thread panics as it reads")
    }
}

fn errno_of(error: &BlockError) -> u32 {
    match error {
        BlockError::Beyond { .. } => errno::EINVAL,
        BlockError::NoRoom(_) => errno::ENOSPC,
        BlockError::Spill(error) if error.is_full() => errno::ENOSPC,
        BlockError::Over => errno::ESHUTDOWN,
        BlockError::Unkept(_)
        | BlockError::Stuck
        | BlockError::Unflushed
        | BlockError::Damaged(_)
        | BlockError::Spill(_)
        | BlockError::Pool(_) => errno::EIO,
    }
}

/// Bytes that may be taken by several.
#[derive(Debug)]
struct Budget {
    free: Mutex<usize>,
    more: Condvar,
}

impl Budget {
    fn take(&self, bytes: usize) {
        let free = self.free.lock().expect("no thread panics with it");
        let mut free =
            self.more.wait_while(free, |free| *free < bytes).expect("no thread panics with it");
        *free -= bytes;
    }

    fn give_back(&self, bytes: usize) {
        *self.free.lock().expect("no thread panics with it") += bytes;
        self.more.notify_one();
    }
}
