//! A volume and those that read it, on real donors, in this process.

use super::*;
use crate::attach::{Client, Held, Role};
use crate::volume::tests::World;
use crate::{BlockError, State, Volume};
use hecaton_memory::{PAGE_SIZE, pages_to_bytes};
use hecaton_testkit::{wait_until, wait_until_seen};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd as _;
use std::sync::Arc;

const PAGE: u64 = PAGE_SIZE as u64;

fn share(volume: &Arc<Volume>) -> (Arc<Sharing>, SharedBy) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let sharing = Sharing::begin(volume, listener.into(), true).unwrap();
    (sharing, SharedBy { node: "a".into(), address })
}

/// One of node b, which goes on with what another has left.
fn reader(from: &SharedBy, state: State) -> Arc<Volume> {
    let described = describe("disk", from, "b", None).unwrap();
    let mut config = VolumeConfig { reads_from: Some(from.clone()), ..described.config };
    config.site.host = "b".into();
    fetch_tables(&config, from, &state).unwrap();
    let (volume, follow) = Volume::open_to_read(config, state).unwrap();
    follow().unwrap();
    volume
}

fn client(pid: i32) -> Client {
    Client::Process { pid, command: "c".into() }
}

fn page(volume: &Volume, page: u64) -> Result<Vec<u8>, BlockError> {
    let mut contents = vec![0xee; PAGE_SIZE];
    volume.read(pages_to_bytes(page), &mut contents).map_err(|(_, error)| error)?;
    Ok(contents)
}

#[test]
fn a_reader_has_what_was_there_when_nobody_wrote() {
    let world = World::new(2, 1, 5000);
    let owner = world.volume();
    let writes = |number: u8| {
        let attached = owner.attach(client(1), Role::Writer).unwrap();
        owner.write(3 * PAGE, &[number; PAGE_SIZE]).unwrap();
        owner.write(4500 * PAGE, &[number; 100]).unwrap();
        drop(attached);
    };
    writes(1);
    let (sharing, from) = share(&owner);
    let refused = describe("other", &from, "b", None).err().unwrap().to_string();
    assert!(refused.contains("here is the volume `disk`"), "{refused}");
    let first = reader(&from, State::create(5000).unwrap());
    let attached = first.attach(client(2), Role::Reader).unwrap();
    assert_eq!(page(&first, 3).unwrap(), [1; PAGE_SIZE]);
    assert_eq!(page(&first, 4500).unwrap()[..101], [vec![1; 100], vec![0]].concat());
    assert_eq!(page(&first, 4).unwrap(), [0; PAGE_SIZE]);
    assert_eq!(first.extents(0, 5 * PAGE, 9).unwrap().len(), 3);
    assert!(matches!(first.attach(client(2), Role::Writer), Err(Held::Elsewhere(_))));
    // Readers here, readers there, and no writer.
    drop(owner.attach(client(1), Role::Reader).unwrap());
    let held = owner.attach(client(1), Role::Writer).unwrap_err().to_string();
    assert!(held.starts_with("node `b` is attached as a reader"), "{held}");
    assert_eq!(sharing.end(false), Err("node `b` is attached to it".to_owned()));
    assert!(owner.check_unattached().unwrap_err().contains("node `b`"));
    assert_eq!(owner.stats(0).readers, ["b"]);

    // It leaves, and what it had is not good for the next one.
    let tables = first.state.as_fd().try_clone_to_owned().unwrap();
    drop(attached);
    first.release().unwrap();
    assert!(matches!(page(&first, 4), Err(BlockError::Over)));
    assert!(owner.stats(0).readers.is_empty(), "it has left");
    writes(2);
    let second = reader(&from, State::from_fd(tables).unwrap());
    let attached = second.attach(client(2), Role::Reader).unwrap();
    assert_eq!(page(&second, 3).unwrap(), [2; PAGE_SIZE]);

    // A writer comes, as if its lease had ended: it is renewed each second, and may be again before
    // the writer is in.
    let writer = wait_until_seen("the writer is in", || {
        owner.attachments.leave(second.reading.as_ref().unwrap().session, &owner.state);
        owner.attach(client(1), Role::Writer)
    });
    owner.write(4 * PAGE, &[3; PAGE_SIZE]).unwrap();
    wait_until("it is told", || matches!(page(&second, 4), Err(BlockError::Unheld(_))));
    let refused = second.attach(client(3), Role::Reader).unwrap_err().to_string();
    assert!(refused.contains("process 1 (c) is attached as the writer"), "{refused}");
    drop(writer);
    wait_until("it is outdated", || {
        let error = page(&second, 4).unwrap_err().to_string();
        error.contains("opened for writing at node `a`")
    });
    // Until those have gone that may have cached what was there.
    drop(attached);
    let _attached = second.attach(client(3), Role::Reader).unwrap();
    assert_eq!(page(&second, 4).unwrap(), [3; PAGE_SIZE]);
    second.abandon();
    sharing.end(true).unwrap();
    assert!(describe("disk", &from, "b", None).is_err());
    owner.release().unwrap();
}

#[test]
fn a_reader_goes_on_with_its_owners_next_process() {
    let world = World::new(2, 1, 5000);
    let first = world.volume();
    first.write(7 * PAGE, &[7; PAGE_SIZE]).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let from = SharedBy { node: "a".into(), address: listener.local_addr().unwrap() };
    let sharing = Sharing::begin(&first, listener.into(), true).unwrap();
    let second = reader(&from, State::create(5000).unwrap());
    let _attached = second.attach(client(2), Role::Reader).unwrap();
    assert_eq!(page(&second, 7).unwrap(), [7; PAGE_SIZE]);
    // As if it was killed.
    sharing.stop();
    drop(sharing);
    let next = world.successor(&first);
    let listener = TcpListener::bind(from.address).unwrap();
    let held = next.attach(client(1), Role::Writer).unwrap_err();
    assert!(matches!(held, Held::ByForgotten(_)), "{held}");
    let _sharing = Sharing::begin(&next, listener.into(), false).unwrap();
    wait_until("it has come back", || next.stats(0).readers == ["b"]);
    wait_until("it goes on", || page(&second, 7).is_ok_and(|page| page == [7; PAGE_SIZE]));
    second.abandon();
    next.release().unwrap();
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let mut world = World::new(1, 1, 100);
    world.config.multi_writer = true;
    let volume = world.volume();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let refused = Sharing::begin(&volume, listener.into(), true).err().unwrap();
    assert!(refused.contains("--multi-writer"), "{refused}");
    volume.release().unwrap();
}
