//! Hands memory over as Firecracker does, byte for byte, when it restores a snapshot, and uses it.
//!
//! `firecracker-client SOCKET IMAGE`: the memory is as large as the image, in two regions that
//! stand in the image in the other order. After that each line `round` on the standard input has
//! all of it compared with what it should hold, and a part of it written; each is answered by
//! `done`.

use anyhow::{Context as _, bail, ensure};
use hecaton_uffd::{
    Uffd,
    abi::{UFFD_FEATURE_EVENT_REMOVE, UFFDIO_REGISTER_MODE_MISSING},
};
use rustix::{
    mm::{MapFlags, ProtFlags, mmap_anonymous},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use std::{
    env, fs,
    io::{BufRead as _, IoSlice},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
};

const PAGE: usize = 4096;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let [socket, image] = &arguments[..] else { bail!("usage: SOCKET IMAGE") };
    let image = fs::read(image).context("the image")?;
    let len = image.len();
    ensure!(len > 0 && len % (4 * PAGE) == 0, "an image of {len} bytes");
    let (first, rest) = (len / 4, len / 4 * 3);

    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses the place.
    let start =
        unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE) }?;
    // SAFETY: just mapped, and until the process ends. Nobody else writes to it but the pager, and
    // only to pages that nobody has read yet.
    let memory = unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>(), len) };
    let uffd = Uffd::open().map_err(|error| anyhow::anyhow!("no userfaultfd: {error:?}"))?;
    // SAFETY: just opened.
    let owned = unsafe { OwnedFd::from_raw_fd(uffd.0) };
    let raw = Uffd(owned.as_raw_fd());
    let set_up = raw.api(UFFD_FEATURE_EVENT_REMOVE).and_then(|_| {
        raw.register(start as u64, len as u64, UFFDIO_REGISTER_MODE_MISSING).map(|_| ())
    });
    set_up.map_err(|error| anyhow::anyhow!("the userfaultfd is not set up: {error:?}"))?;

    let stream = UnixStream::connect(socket).context("the pager's socket")?;
    let base = start as u64;
    let message = format!(
        "[{{\"base_host_virt_addr\":{base},\"size\":{first},\"offset\":{rest},\
         \"page_size\":4096,\"page_size_kib\":4096}},\
         {{\"base_host_virt_addr\":{},\"size\":{rest},\"offset\":0,\
         \"page_size\":4096,\"page_size_kib\":4096}}]",
        base + first as u64
    );
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let fds = [owned.as_fd()];
    ensure!(rights.push(SendAncillaryMessage::ScmRights(&fds)), "no room for a descriptor");
    sendmsg(&stream, &[IoSlice::new(message.as_bytes())], &mut rights, SendFlags::NOSIGNAL)?;
    println!("done");

    let mut expected = [&image[rest..], &image[..rest]].concat();
    for (round, line) in std::io::stdin().lock().lines().enumerate() {
        ensure!(line? == "round", "not a round");
        for (page, (found, expected)) in memory.chunks(PAGE).zip(expected.chunks(PAGE)).enumerate()
        {
            ensure!(found == expected, "page {page} is wrong in round {round}");
        }
        for page in (round % 3..len / PAGE).step_by(3) {
            let stamp = ((page * 31 + round) as u64).to_le_bytes();
            for bytes in [&mut *memory, &mut expected[..]] {
                bytes[page * PAGE..][..8].copy_from_slice(&stamp);
            }
        }
        println!("done");
    }
    // Firecracker keeps both as long as it lives.
    drop((stream, owned));
    Ok(())
}
