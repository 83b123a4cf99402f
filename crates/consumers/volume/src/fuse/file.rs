//! Answers the requests for a volume's file, over either transport.
//!
//! A write is answered as everywhere: when all copies, the write buffer or the spill file has it.
//! Dirty pages of this host's page cache are the kernel's. It writes them before it sends `fsync`.
//!
//! A read-only file is mounted read-only, so that the kernel refuses changes. This module refuses
//! them, too.

use super::gate::Gate;
use crate::attach::Role;
use crate::volume::{Contents, Volume};
use hecaton_fuse::wire::{
    Answer, Attributes, MAJOR, MIN_MINOR, Reply, Request, init, init_answer, opcode, set,
};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{SystemTime, UNIX_EPOCH};

/// Longest read or write: the kernel cuts longer ones.
pub(super) const MAX_IO_BYTES: usize = 256 << 10;

/// Limit on the kernel's pending background requests: read-ahead, direct writes, write-back.
const BACKGROUND: u16 = 64;

/// Seconds for which the kernel may cache the file's attributes.
const ATTRIBUTES_VALID_S: u64 = 1;

/// A regular file that its owner may read and write.
const MODE: u32 = 0o100_600;
/// A regular file that its owner may only read.
const READ_ONLY_MODE: u32 = 0o100_400;

/// fallocate(2): pages become holes.
const PUNCH_HOLE: u32 = 2;
/// fallocate(2): pages become zeros, and take room.
const ZERO_RANGE: u32 = 16;
/// fallocate(2): the file keeps its length, which it does in any case.
const KEEP_SIZE: u32 = 1;

/// lseek(2).
const SEEK_DATA: u32 = 3;
/// lseek(2).
const SEEK_HOLE: u32 = 4;

/// A volume on one mount.
pub(super) struct File {
    /// Access of all clients that open the file.
    role: Role,
    volume: Arc<Volume>,
    gate: Arc<Gate>,
    /// Unix time in seconds.
    modified_s: AtomicU64,
}

impl File {
    pub(super) fn new(volume: Arc<Volume>, gate: Arc<Gate>, role: Role) -> File {
        File { role, volume, gate, modified_s: AtomicU64::new(now_s()) }
    }

    /// The volume's name.
    pub(super) fn name(&self) -> &str {
        self.volume.name()
    }

    /// Executes a request, or fails it if the file is no longer served. `data` is the place of a
    /// write's data in `buffer`. The answer goes to the start of `buffer`.
    pub(super) fn reply(&self, request: &Request, buffer: &mut [u8], data: Range<usize>) -> Reply {
        if !self.gate.enter() {
            return Reply::Error(Errno::IO);
        }
        let reply = self.do_it(request, buffer, data);
        self.gate.leave();
        reply
    }

    fn do_it(&self, request: &Request, buffer: &mut [u8], data: Range<usize>) -> Reply {
        if self.role == Role::Reader && request.changes_the_file() {
            return Reply::Error(Errno::ROFS);
        }
        match request.opcode {
            opcode::INIT => init_reply(request, buffer, false),
            opcode::GETATTR => self.attributes().put_in(buffer),
            opcode::SETATTR => match self.set_attributes(request) {
                Ok(()) => self.attributes().put_in(buffer),
                Err(errno) => Reply::Error(errno),
            },
            opcode::OPEN => Answer::<16>::new().put_in(buffer),
            opcode::READ => {
                let (offset, bytes) = (request.u64_at(8), request.u32_at(16) as usize);
                let left = self.volume.size_bytes().saturating_sub(offset);
                let bytes =
                    bytes.min(MAX_IO_BYTES).min(usize::try_from(left).unwrap_or(usize::MAX));
                match self.volume.read(offset, &mut buffer[..bytes]) {
                    Ok(_) => Reply::Bytes(bytes),
                    Err((_, error)) => Reply::Error(error.errno()),
                }
            }
            opcode::WRITE => {
                let data = buffer.get(data).unwrap_or_default();
                let (offset, bytes) = (request.u64_at(8), request.u32_at(16));
                let written = match data.get(..bytes as usize) {
                    Some(data) => self.volume.write(offset, data).map_err(|error| error.errno()),
                    None => Err(Errno::INVAL),
                };
                match written {
                    Ok(()) => {
                        self.modified_s.store(now_s(), Relaxed);
                        Answer::<8>::new().u32(bytes).put_in(buffer)
                    }
                    Err(errno) => Reply::Error(errno),
                }
            }
            opcode::FALLOCATE => match self.allocate(request) {
                Ok(()) => Reply::Bytes(0),
                Err(errno) => Reply::Error(errno),
            },
            opcode::LSEEK => match self.seek(request.u64_at(8), request.u32_at(16)) {
                Ok(offset) => Answer::<8>::new().u64(offset).put_in(buffer),
                Err(errno) => Reply::Error(errno),
            },
            opcode::STATFS => {
                let pages = self.volume.size_bytes() / 4096;
                // Longest name: 255 bytes. The file system has no names.
                let sizes = Answer::<80>::new().u64(pages).u64(0).u64(0).u64(1).u64(0);
                sizes.u32(4096).u32(255).u32(4096).put_in(buffer)
            }
            // Stores the write buffer, and syncs the spill file. All copies have the rest already.
            opcode::FSYNC => match self.volume.flush() {
                Ok(()) => Reply::Bytes(0),
                Err(error) => Reply::Error(error.errno()),
            },
            opcode::FLUSH | opcode::RELEASE | opcode::DESTROY => Reply::Bytes(0),
            // An interrupted request is answered like any other.
            opcode::INTERRUPT | opcode::FORGET | opcode::BATCH_FORGET => Reply::Nothing,
            _ => Reply::Error(Errno::NOSYS),
        }
    }

    fn attributes(&self) -> Answer<104> {
        let attributes = Attributes {
            size_bytes: self.volume.size_bytes(),
            data_bytes: self.volume.data_bytes(),
            modified_s: self.modified_s.load(Relaxed),
            mode: match self.role {
                Role::Writer => MODE,
                Role::Reader => READ_ONLY_MODE,
            },
            user: geteuid().as_raw(),
            group: getegid().as_raw(),
        };
        attributes.answer(ATTRIBUTES_VALID_S)
    }

    fn set_attributes(&self, request: &Request) -> Result<(), Errno> {
        let wanted = request.u32_at(0);
        if wanted & (set::MODE | set::UID | set::GID) != 0 {
            return Err(Errno::PERM);
        }
        if wanted & set::SIZE != 0 {
            let size = request.u64_at(16);
            // O_TRUNC has no effect, as on a disk: `cp` begins with it.
            let is_by_opening = size == 0 && wanted & set::HANDLE == 0;
            if size != self.volume.size_bytes() && !is_by_opening {
                return Err(Errno::INVAL);
            }
        }
        if wanted & set::MTIME_NOW != 0 {
            self.modified_s.store(now_s(), Relaxed);
        } else if wanted & set::MTIME != 0 {
            self.modified_s.store(request.u64_at(40), Relaxed);
        }
        Ok(())
    }

    fn allocate(&self, request: &Request) -> Result<(), Errno> {
        let (offset, bytes, mode) = (request.u64_at(8), request.u64_at(16), request.u32_at(24));
        let allocate = match mode & !KEEP_SIZE {
            PUNCH_HOLE => false,
            ZERO_RANGE => true,
            // Space cannot be reserved without contents.
            _ => return Err(Errno::OPNOTSUPP),
        };
        let left = self.volume.size_bytes().saturating_sub(offset);
        let zeroed = self.volume.write_zeroes(offset, bytes.min(left), allocate);
        zeroed.map_err(|error| error.errno())?;
        self.modified_s.store(now_s(), Relaxed);
        Ok(())
    }

    /// Offset of the next data or the next hole. A hole follows the last byte.
    fn seek(&self, offset: u64, whence: u32) -> Result<u64, Errno> {
        let wanted = match whence {
            SEEK_DATA => Contents::Data,
            SEEK_HOLE => Contents::Hole,
            _ => return Err(Errno::INVAL),
        };
        let left = self.volume.size_bytes().checked_sub(offset).filter(|left| *left > 0);
        let left = left.ok_or(Errno::NXIO)?;
        let extents = self.volume.extents(offset, left, 2).map_err(|error| error.errno())?;
        match extents.as_slice() {
            [first, ..] if first.contents == wanted => Ok(offset),
            [first, _] => Ok(offset + first.bytes),
            _ if wanted == Contents::Hole => Ok(offset + left),
            _ => Err(Errno::NXIO),
        }
    }
}

/// Answers the first message. `over_uring` asks for requests through io_uring.
pub(super) fn init_reply(request: &Request, buffer: &mut [u8], over_uring: bool) -> Reply {
    match answer_init(request, over_uring) {
        Ok(answer) => answer.put_in(buffer),
        Err(errno) => Reply::Error(errno),
    }
}

fn answer_init(request: &Request, over_uring: bool) -> Result<Answer<64>, Errno> {
    let (major, minor) = (request.u32_at(0), request.u32_at(4));
    if major != MAJOR || minor < MIN_MINOR {
        tracing::error!(major, minor, "the kernel's FUSE is too old: Linux 5.4 is needed");
        return Err(Errno::PROTO);
    }
    let can = init::ASYNC_READ | init::BIG_WRITES | init::ASYNC_DIO | init::MAX_PAGES;
    let (further, extended) = match over_uring {
        true => (init::OVER_URING, init::EXTENDED),
        false => (0, 0),
    };
    let flags = request.u32_at(12) & can | extended;
    Ok(init_answer(request.u32_at(8), flags, further, BACKGROUND, MAX_IO_BYTES as u32))
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
