//! Threads that answer the kernel.
//!
//! Each has a buffer of its own that holds the longest request, and takes the next request as it has
//! answered the one before. So as many are under way as there are threads, and the rest wait in the
//! kernel.
//!
//! A write is answered when all copies have it, as everywhere: what waits in the page cache of this
//! host is the kernel's, and `fsync` has it written before it comes here.
//!
//! A file that is to be read only is mounted so, and the kernel refuses what would change it; it is
//! refused here, too.

use super::wire::{
    Answer, Attributes, IN_HEADER_BYTES, MAJOR, MIN_MINOR, Request, WRITE_ARGUMENTS_BYTES,
    answer_header, init, init_answer, opcode, set,
};
use crate::attach::Role;
use crate::volume::{Contents, Volume};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid};
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

/// Requests of a file that are under way at a time.
const THREADS: usize = 16;

/// Longest read or write: the kernel cuts longer ones.
const MAX_IO_BYTES: usize = 256 << 10;

/// Requests that the kernel has wait that nobody waits for: read-ahead, direct and late writes.
const BACKGROUND: u16 = 64;

/// How long the kernel may believe what it was told of the file.
const ATTRIBUTES_VALID_S: u64 = 1;

/// A regular file, its owner's.
const MODE: u32 = 0o100_600;
/// One that nobody writes.
const READ_ONLY_MODE: u32 = 0o100_400;

/// fallocate(2): pages become holes.
const PUNCH_HOLE: u32 = 2;
/// fallocate(2): pages become zeros, and take room.
const ZERO_RANGE: u32 = 16;
/// fallocate(2): the file stays as long as it is. It does in any case.
const KEEP_SIZE: u32 = 1;

/// lseek(2).
const SEEK_DATA: u32 = 3;
/// lseek(2).
const SEEK_HOLE: u32 = 4;

/// Serves a volume on any number of mounts.
pub struct FileServer {
    volume: Arc<Volume>,
    gate: Arc<Gate>,
}

/// Lets requests through until it is closed.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    left: Condvar,
}

#[derive(Default)]
struct GateState {
    is_closed: bool,
    within: usize,
}

impl FileServer {
    /// A server of no mount yet.
    pub fn new(volume: Arc<Volume>) -> FileServer {
        FileServer { volume, gate: Arc::default() }
    }

    /// Serves a mount, given its descriptor, until it is unmounted: a new one, or one whose process
    /// was killed.
    pub fn serve(&self, device: OwnedFd, role: Role) -> std::io::Result<()> {
        let file = Arc::new(File {
            device,
            role,
            volume: Arc::clone(&self.volume),
            gate: Arc::clone(&self.gate),
            modified_s: AtomicU64::new(now_s()),
        });
        for _ in 0..THREADS {
            let file = Arc::clone(&file);
            // In advance: swap must not wait for a thread.
            let buffer = vec![0; IN_HEADER_BYTES + WRITE_ARGUMENTS_BYTES + MAX_IO_BYTES];
            std::thread::Builder::new().name("fuse".into()).spawn(move || file.work(buffer))?;
        }
        Ok(())
    }

    /// Answers what is under way, and with errors what comes after.
    pub fn stop(&self) {
        let mut state = self.gate.state();
        state.is_closed = true;
        let is_any_within = |state: &mut GateState| state.within > 0;
        let left = self.gate.left.wait_while(state, is_any_within);
        drop(left.expect("no thread panics with the gate"));
    }
}

impl Gate {
    fn enter(&self) -> bool {
        let mut state = self.state();
        if !state.is_closed {
            state.within += 1;
        }
        !state.is_closed
    }

    fn leave(&self) {
        let mut state = self.state();
        state.within -= 1;
        if state.within == 0 {
            self.left.notify_all();
        }
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().expect("no thread panics with the gate")
    }
}

/// A volume on one mount.
struct File {
    device: OwnedFd,
    /// Of those who open it.
    role: Role,
    volume: Arc<Volume>,
    gate: Arc<Gate>,
    /// Since 1970.
    modified_s: AtomicU64,
}

/// What a request is answered with.
enum Reply {
    /// So many bytes at the start of the buffer.
    Bytes(usize),
    Error(Errno),
    /// None is expected.
    Nothing,
}

impl File {
    fn work(&self, mut buffer: Vec<u8>) {
        loop {
            let read = match rustix::io::read(&self.device, &mut buffer) {
                Ok(read) => read,
                // Interrupted, or the request was taken back before it was read.
                Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => continue,
                // Unmounted.
                Err(Errno::NODEV) => return,
                Err(errno) => {
                    let volume = self.volume.name();
                    return tracing::error!(volume, %errno, "requests for a file cannot be read");
                }
            };
            let Some(Request { unique, .. }) = Request::decode(&buffer[..read]) else { continue };
            let reply = match self.gate.enter() {
                true => {
                    let reply = self.reply(&mut buffer, read);
                    self.gate.leave();
                    reply
                }
                false => Reply::Error(Errno::IO),
            };
            let (errno, bytes) = match reply {
                Reply::Bytes(bytes) => (0, bytes),
                Reply::Error(errno) => (errno.raw_os_error(), 0),
                Reply::Nothing => continue,
            };
            let header = answer_header(unique, errno, bytes);
            let parts = [IoSlice::new(&header), IoSlice::new(&buffer[..bytes])];
            match rustix::io::writev(self.device.as_fd(), &parts) {
                // Nobody waits for it any more.
                Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
                Err(errno) => {
                    let volume = self.volume.name();
                    tracing::error!(volume, %errno, "the kernel takes no answer");
                }
            }
        }
    }

    /// Does what the message at the start of the buffer wants.
    fn reply(&self, buffer: &mut [u8], read: usize) -> Reply {
        let (message, _) = buffer.split_at(read);
        let request = Request::decode(message).expect("it was looked at before");
        if self.role == Role::Reader && request.changes_the_file() {
            return Reply::Error(Errno::ROFS);
        }
        match request.opcode {
            opcode::INIT => match answer_init(&request) {
                Ok(answer) => answer.put_in(buffer),
                Err(errno) => Reply::Error(errno),
            },
            opcode::GETATTR => self.attributes().put_in(buffer),
            opcode::SETATTR => match self.set_attributes(&request) {
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
                let data = request.arguments.get(WRITE_ARGUMENTS_BYTES..).unwrap_or_default();
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
            opcode::FALLOCATE => match self.allocate(&request) {
                Ok(()) => Reply::Bytes(0),
                Err(errno) => Reply::Error(errno),
            },
            opcode::LSEEK => match self.seek(request.u64_at(8), request.u32_at(16)) {
                Ok(offset) => Answer::<8>::new().u64(offset).put_in(buffer),
                Err(errno) => Reply::Error(errno),
            },
            opcode::STATFS => {
                let pages = self.volume.size_bytes() / 4096;
                // No name is longer than 255 bytes, says a file system without names.
                let sizes = Answer::<80>::new().u64(pages).u64(0).u64(0).u64(1).u64(0);
                sizes.u32(4096).u32(255).u32(4096).put_in(buffer)
            }
            // Whatever was answered is with all copies.
            opcode::FSYNC => match self.volume.flush() {
                Ok(()) => Reply::Bytes(0),
                Err(error) => Reply::Error(error.errno()),
            },
            opcode::FLUSH | opcode::RELEASE | opcode::DESTROY => Reply::Bytes(0),
            // What is interrupted is answered like anything else.
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

    fn set_attributes(&self, request: &Request<'_>) -> Result<(), Errno> {
        let wanted = request.u32_at(0);
        if wanted & (set::MODE | set::UID | set::GID) != 0 {
            return Err(Errno::PERM);
        }
        if wanted & set::SIZE != 0 {
            let size = request.u64_at(16);
            // O_TRUNC means as little to this file as to a disk: `cp` begins with it.
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

    fn allocate(&self, request: &Request<'_>) -> Result<(), Errno> {
        let (offset, bytes, mode) = (request.u64_at(8), request.u64_at(16), request.u32_at(24));
        let allocate = match mode & !KEEP_SIZE {
            PUNCH_HOLE => false,
            ZERO_RANGE => true,
            // Room without contents is not kept for anybody.
            _ => return Err(Errno::OPNOTSUPP),
        };
        let left = self.volume.size_bytes().saturating_sub(offset);
        let zeroed = self.volume.write_zeroes(offset, bytes.min(left), allocate);
        zeroed.map_err(|error| error.errno())?;
        self.modified_s.store(now_s(), Relaxed);
        Ok(())
    }

    /// Where the next data, or the next hole, begins. Behind the last byte is a hole.
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

impl<const BYTES: usize> Answer<BYTES> {
    fn put_in(&self, buffer: &mut [u8]) -> Reply {
        buffer[..BYTES].copy_from_slice(self.bytes());
        Reply::Bytes(BYTES)
    }
}

fn answer_init(request: &Request<'_>) -> Result<Answer<64>, Errno> {
    let (major, minor) = (request.u32_at(0), request.u32_at(4));
    if major != MAJOR || minor < MIN_MINOR {
        tracing::error!(major, minor, "the kernel's FUSE is too old: Linux 5.4 is needed");
        return Err(Errno::PROTO);
    }
    let can = init::ASYNC_READ | init::BIG_WRITES | init::ASYNC_DIO | init::MAX_PAGES;
    let flags = request.u32_at(12) & can;
    Ok(init_answer(request.u32_at(8), flags, BACKGROUND, MAX_IO_BYTES as u32))
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
