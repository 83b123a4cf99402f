//! Hand-overs that are wrong in each way that one can be, beside a machine that works on.

use crate::PAGES;
use crate::machine::{Client, Memory, PAGE};
use crate::world::{Machine, World};
use hecaton_testkit::wait_until;
use hecaton_uffd::guest_ram::{Handover, MAGIC};
use hecaton_uffd::handover::Range;
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd as _, OwnedFd};

fn message(first: u32, region: Range, offset: u64) -> Handover {
    Handover { magic: MAGIC, first, region, offset }
}

pub(crate) fn handovers_harm_nobody() {
    let world = World::start();
    let memory = Memory::new(64);
    let whole = memory.range();
    let page = PAGE as u64;

    // Each with a connection of its own, before any machine is there.
    let refused = |say: &dyn Fn(&Client) -> Result<(), String>, why: &str| {
        let client = Client::connect(&world.socket);
        client.register(whole.start, whole.len).unwrap();
        let reason = say(&client).expect_err(why);
        assert!(reason.contains(why), "`{reason}` does not say `{why}`");
    };
    let with = |client: &Client, message: Handover, file: &OwnedFd| {
        client.say(message.as_bytes(), &[client.uffd.as_fd(), file.as_fd()])
    };
    let file = &memory.file;
    let good = message(1, whole, 0);
    refused(&|client| client.say(good.as_bytes(), &[]), "0 descriptors");
    refused(&|client| client.say(good.as_bytes(), &[client.uffd.as_fd()]), "1 descriptors");
    refused(
        &|client| client.say(good.as_bytes(), &[file.as_fd(), client.uffd.as_fd()]),
        "no userfaultfd",
    );
    let five = |client: &Client| client.say(good.as_bytes(), &[file.as_fd(); 5]);
    refused(&five, "hung up");
    refused(&|client| client.say(&good.as_bytes()[..31], &[]), "hung up");
    refused(&|client| client.say(&[0xff; 4096], &[]), "hung up");
    refused(&|client| with(client, message(2, whole, 0), file), "descriptors");
    refused(&|client| with(client, message(1, whole, 17), file), "whole pages");
    let odd = Range { len: 100, ..whole };
    refused(&|client| with(client, message(1, odd, 0), file), "whole pages");
    let wild = Range { len: !(page - 1), ..whole };
    refused(&|client| with(client, message(1, wild, 0), file), "outside");
    refused(&|client| with(client, message(1, whole, page), file), "ends at");
    let elsewhere = Range { start: whole.start - 256 * page, len: page };
    refused(&|client| with(client, message(1, elsewhere, 0), file), "not registered");
    let disk: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
    refused(&|client| with(client, good, &disk), "not in memory");
    let sealed = rustix::fs::memfd_create("sealed", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sealed, whole.len).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    refused(&|client| with(client, good, &sealed), "sealed");
    let huge = rustix::fs::memfd_create("huge", MemfdFlags::HUGETLB);
    if let Ok(huge) = huge
        && rustix::fs::ftruncate(&huge, 2 << 20).is_ok()
    {
        refused(&|client| with(client, good, &huge), "huge pages");
    }
    // A peer that hangs up without a word, and one that says nothing at all.
    drop(Client::connect(&world.socket));
    let silent = Client::connect(&world.socket);

    let mut machine = Machine::start(&world, PAGES);
    machine.order("fill");
    refused(&|client| with(client, good, file), "serves a machine already");
    machine.begin("hammer 2000");
    refused(&|client| with(client, good, file), "serves a machine already");
    machine.wait();
    machine.order("check");
    assert!(world.stats().handovers_refused >= 13, "{:?}", world.stats());
    assert_eq!(world.pager_memory_files(), 1, "descriptors of refused hand-overs are closed");
    // Beside the pager's own three: userfaultfd, connection and memory file.
    wait_until("the node holds what is needed", || world.held() == 6);
    machine.end();
    drop(silent);

    // On a connection that is good, what is wrong is refused and the rest goes on.
    let client = Client::connect(&world.socket);
    client.register(whole.start, whole.len).unwrap();
    let half = Range { len: whole.len / 2, ..whole };
    wait_until("the machine's end is noticed", || world.stats().processes == 0);
    with(&client, message(1, half, 0), file).unwrap();
    let further = |message: Handover| client.say(message.as_bytes(), &[file.as_fd()]);
    let overlapping = Range { start: whole.start + half.len - page, len: half.len };
    assert!(further(message(0, overlapping, half.len)).unwrap_err().contains("overlaps"));
    let rest = Range { start: whole.start + half.len, len: half.len };
    assert!(further(message(0, rest, 0)).unwrap_err().contains("same part"));
    assert!(client.say(b"what?", &[]).unwrap_err().contains("not one of this version"));
    further(message(0, rest, half.len)).unwrap();
    // SAFETY: mapped, and handed over.
    unsafe {
        memory.start.write_volatile(7);
        memory.start.add(memory.len - 1).write_volatile(8);
    }
    assert_eq!(world.stats().local_bytes, 2 * page);
    drop(client);
    // SAFETY: nobody uses it any more; the pager sees it go, since this process lives on.
    unsafe { rustix::mm::munmap(memory.start.cast(), memory.len).unwrap() };
    assert_eq!(world.stats().guest_ram_bytes, 0);
    assert_eq!(world.stats().local_bytes, 0);
    // This process is the machine, and lives: so the pager would wait for it.
    drop(world);
}
