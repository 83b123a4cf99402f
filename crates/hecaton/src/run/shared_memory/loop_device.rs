//! Loop devices that go by themselves.
//!
//! `losetup` makes none of these. A device that is made by it and then told to go may stay for ever
//! if this process is killed in between.

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

// Of <linux/loop.h>.
const LOOP_CONFIGURE: libc::Ioctl = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4c82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_config`, with the fields of `struct loop_info64` that are used.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    /// Device, inode, its device, offset, limit of the size.
    unused: [u64; 5],
    /// Number, and the kind and key size of an encryption.
    unused_too: [u32; 3],
    flags: u32,
    file_name: [u8; 64],
    /// A name and a key of an encryption.
    more_unused: [u8; 96],
    /// And two words of that.
    words_unused: [u64; 2],
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304);

/// Most attempts at a device that somebody else takes.
const ATTEMPTS: usize = 32;

/// A loop device. The kernel removes it when nobody has it open or mounted.
pub(super) struct Loop {
    pub(super) path: PathBuf,
    pub(super) device: OwnedFd,
}

impl Loop {
    /// The device on this file: the one that is there, or a new one, without a page cache of its
    /// own.
    pub(super) fn on(file: &Path) -> io::Result<Loop> {
        for _ in 0..ATTEMPTS {
            if let Some(path) = existing(file)
                && let Ok(device) = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                && existing(file).as_deref() == Some(&path)
            {
                return Ok(Loop { path, device });
            }
            match new(file) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                made => return made,
            }
        }
        Err(io::Error::other("other processes take each loop device"))
    }
}

/// The device on this file, if there is one.
fn existing(file: &Path) -> Option<PathBuf> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let is_it = |name: &String| {
        let backing = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file"));
        backing.is_ok_and(|backing| Path::new(backing.trim_end_matches('\n')) == file)
    };
    let mut names = devices.filter_map(|entry| entry.file_name().into_string().ok());
    names.find(is_it).map(|name| Path::new("/dev").join(name))
}

fn new(file: &Path) -> io::Result<Loop> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let backing = open(file, flags, Mode::empty())?;
    let control = open("/dev/loop-control", flags, Mode::empty())?;
    // SAFETY: it takes no argument.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    let path = PathBuf::from(format!("/dev/loop{number}"));
    let device = match open(&path, flags, Mode::empty()) {
        // Somebody else's, or removed, since.
        Err(Errno::BUSY | Errno::NXIO) => return Err(Errno::BUSY.into()),
        opened => opened?,
    };
    let mut config = LoopConfig {
        fd: backing.as_raw_fd() as u32,
        block_size: 4096,
        unused: [0; 5],
        unused_too: [0; 3],
        flags: LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO,
        file_name: [0; 64],
        more_unused: [0; 96],
        words_unused: [0; 2],
        reserved: [0; 8],
    };
    let name = file.as_os_str().as_encoded_bytes();
    let shown = name.len().min(config.file_name.len() - 1);
    config.file_name[..shown].copy_from_slice(&name[..shown]);
    // SAFETY: the kernel reads the structure, and takes another descriptor of the file.
    match unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } {
        0 => Ok(Loop { path, device }),
        _ => Err(io::Error::last_os_error()),
    }
}
