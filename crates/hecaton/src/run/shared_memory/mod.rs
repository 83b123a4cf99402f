//! `hecaton shared-memory-keeper`: sets up the file system for the shared memory of one consumer,
//! and serves it ([`hecaton_shared`]).
//!
//! The disk is the volume's block device where the kernel has ublk, and else a loop device on the
//! volume's file. Nothing has to be taken down: the kernel unmounts the file system when the keeper
//! and the last program have closed it, the loop device goes with that, and the node deletes the
//! volume of a consumer that has ended.
//!
//! A keeper that is killed before it is done leaves a volume that nobody uses until the consumer
//! ends; the next keeper makes another. Then the disk is noted beside the record, and the next
//! keeper mounts that.

mod disk_note;
mod file_system;
mod loop_device;

use super::disk::Volume;
use crate::tools;
use anyhow::{Context as _, bail};
use disk_note::Disk;
use hecaton_memory::random_u64;
use hecaton_node::socket::message::CreateVolume;
use hecaton_shared::cache;
use hecaton_shared::keeper::{self, Mounted};
use hecaton_shared::line::Start;
use loop_device::Loop;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Bytes of the volume, which takes memory of the pool only as it is written.
const VOLUME_BYTES: u64 = 1 << 40;

/// From this on Linux sends requests again that a killed server of a file has not answered.
const RESENDS_FROM: (u32, u32) = (6, 9);

/// The part of the consumer's name that is in the volume's.
const MAX_CONSUMER: usize = 40;

pub(crate) fn run() -> anyhow::Result<ExitCode> {
    keeper::run(|start| set_up(start).map_err(|error| format!("{error:#}")))?;
    Ok(ExitCode::SUCCESS)
}

fn set_up(start: &Start) -> anyhow::Result<Mounted> {
    if !rustix::process::geteuid().is_root() {
        bail!("shared memory is in the pool only if the node runs as root");
    }
    check_page_cache()?;
    let note = disk_note::path(&start.record);
    let disk = match disk_note::read(&note)? {
        Some(disk) => disk,
        None => {
            tools::require("mkfs.ext4", "e2fsprogs")?;
            let disk = make_disk(start)?;
            file_system::make(&disk.open()?.path)?;
            disk_note::write(&note, &disk)?;
            disk
        }
    };
    let opened = disk.open()?;
    let root = file_system::mount(&opened.path)
        .with_context(|| format!("cannot mount {}", opened.path.display()))?;
    Ok(Mounted { root, device: file_system::numbers(&opened.path)? })
}

/// Eviction needs to know which pages are cached.
fn check_page_cache() -> anyhow::Result<()> {
    let any = File::open("/proc/self/exe")?;
    cache::cached(&any, 0..0).map(drop).context("shared memory needs Linux 6.5 or newer")
}

fn make_disk(start: &Start) -> anyhow::Result<Disk> {
    let number = random_u64() as u32;
    let consumer = &start.consumer[..start.consumer.len().min(MAX_CONSUMER)];
    let wish = CreateVolume {
        name: format!("{consumer}.shared-{number:08x}"),
        size_bytes: VOLUME_BYTES,
        copies: Some(start.copies),
        donors: start.donors.clone(),
        donor_patience_s: Some(start.donor_patience_s),
        scrub_bytes_per_s: Some(start.scrub_bytes_per_s),
        copying_bytes_per_s: Some(start.copying_bytes_per_s),
        failover_ms: Some(start.failover_ms),
        encrypt: start.encrypt,
        shared_memory_of: Some(start.space),
        ..CreateVolume::default()
    };
    let volume = Volume::create(start.node.clone(), wish)?;
    match volume.block_device() {
        Ok(path) => Ok(Disk::BlockDevice(path)),
        Err(error) => {
            tracing::debug!(volume = volume.name(), "a loop device: {error:#}");
            check_resending()?;
            let mut path = start.record.clone().into_os_string();
            path.push(format!(".disk-{number:08x}"));
            let path = PathBuf::from(path);
            volume.file(&path)?;
            Ok(Disk::File(path))
        }
    }
}

/// Without that, a loop device fails when the process that serves its file is killed.
fn check_resending() -> anyhow::Result<()> {
    let known = rustix::system::uname();
    let release = known.release().to_string_lossy();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    anyhow::ensure!(
        version >= RESENDS_FROM,
        "shared memory needs Linux 6.9 or newer, or the ublk driver; this is {release}"
    );
    Ok(())
}

/// A disk that is there for as long as this is, or as its file system is mounted.
struct Opened {
    path: PathBuf,
    _device: Option<OwnedFd>,
}

impl Disk {
    fn open(&self) -> anyhow::Result<Opened> {
        match self {
            Disk::BlockDevice(path) => Ok(Opened { path: path.clone(), _device: None }),
            Disk::File(file) => {
                let Loop { path, device } = Loop::on(file)
                    .with_context(|| format!("no loop device on {}", file.display()))?;
                Ok(Opened { path, _device: Some(device) })
            }
        }
    }
}

/// The first byte of a path's name is not that of an option.
fn as_text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().context("a path that is no text")
}
