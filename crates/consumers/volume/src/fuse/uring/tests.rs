//! Against the kernel of this machine, as far as it has what is needed.

use super::entry::Entry;
use super::*;
use crate::attach::Role;
use crate::fuse::file::{File, init_reply};
use crate::fuse::mount::{Mount, MountError};
use crate::volume::tests::World;
use hecaton_fuse::device::Device;
use hecaton_fuse::wire::opcode;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// The kernel lets FUSE have io_uring for as long as this is there.
struct Enabled(String);

impl Enabled {
    fn new() -> io::Result<Enabled> {
        let before = fs::read_to_string(PARAMETER)?;
        fs::write(PARAMETER, "Y")?;
        Ok(Enabled(before))
    }
}

impl Drop for Enabled {
    fn drop(&mut self) {
        let _ = fs::write(PARAMETER, self.0.trim());
    }
}

/// A volume of a page, which is a file.
fn mounted(path: &Path) -> Option<(Enabled, Mount)> {
    let enabled = match Enabled::new() {
        Ok(enabled) => enabled,
        Err(error) => {
            println!("skipped: {PARAMETER}: {error}");
            return None;
        }
    };
    match Mount::new(path, "disk", Role::Writer) {
        Ok(mount) => Some((enabled, mount)),
        Err(error @ (MountError::Device(_) | MountError::Mount { .. })) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn in_service(mount: &Mount, world: &World) -> Arc<Mounted> {
    let file = Arc::new(File::new(world.volume(), Arc::default(), Role::Writer));
    Arc::new(Mounted {
        device: Device::new(mount.as_fd().try_clone_to_owned().unwrap(), "disk"),
        file,
    })
}

/// One entry for each queue, given to the kernel.
fn entries(mounted: &Mounted) -> Vec<Entry<'_>> {
    let queues = processors(&fs::read_to_string(PROCESSORS).unwrap()).unwrap();
    let queues = 0..u16::try_from(queues).unwrap();
    let mut entries: Vec<_> = queues.map(|queue| Entry::new(mounted, queue).unwrap()).collect();
    entries.iter_mut().for_each(|entry| entry.register().unwrap());
    entries
}

/// Has this thread, and those that it starts, on one processor alone, and returns its number.
fn stay_on_one_processor() -> usize {
    // SAFETY: both sets are of plain integers, and of the size that is told.
    unsafe {
        let processor = usize::try_from(libc::sched_getcpu()).unwrap();
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processor, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &raw const set), 0);
        processor
    }
}

/// The kernel resends no io_uring request to a successor. So files that must outlive the processes
/// that serve them do not use io_uring. If this test fails because the request comes back, they
/// can.
#[test]
fn the_kernel_gives_a_successor_nothing_that_a_process_had() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let world = World::new(1, 1, 1);
    let Some((_enabled, mut mount)) = mounted(&path) else { return };
    // Requests come to the queue of the processor where they are made.
    let here = stay_on_one_processor();
    let first = in_service(&mount, &world);
    let mut buffer = vec![0; 1 << 20];
    let (init, _) = first.device.next(&mut buffer).unwrap();
    assert!(init.opcode == opcode::INIT && init.offers_uring());
    let reply = init_reply(&init, &mut buffer, true);
    first.device.answer(init.unique, &reply, &buffer);
    let mut served = entries(&first);
    let read = {
        let path = path.clone();
        thread::spawn(move || fs::File::open(path)?.read_at(&mut [0; 4096], 0))
    };
    let lost = loop {
        let request = served[here].next().unwrap().unwrap();
        if request.opcode == opcode::READ {
            break request.unique;
        }
        served[here].answer(&request);
    };
    // The process is gone, its successor is there, and somebody asks it for something.
    drop(served);
    mount.resend().unwrap();
    let second = in_service(&mount, &world);
    let mut served = entries(&second);
    let looked = thread::spawn(move || fs::File::open(path).and_then(|file| file.metadata()));
    // A resent request would arrive before the new ones.
    loop {
        let request = served[here].next().unwrap().unwrap();
        assert!(request.opcode != opcode::READ && request.unique != lost, "it comes back");
        served[here].answer(&request);
        if request.opcode == opcode::OPEN {
            break;
        }
    }
    drop(served);
    drop((second, first));
    // Nobody has the descriptor any more: who waits has an error.
    drop(mount);
    let read = read.join().unwrap();
    assert!(read.is_err(), "{read:?}");
    let _ = looked.join().unwrap();
}

#[test]
fn processors_are_counted() {
    let counted = |list| processors(list).unwrap_or(0);
    assert_eq!(["0\n", "0-1\n", "0-3,8,10-11"].map(counted), [1, 2, 7]);
    for list in ["", "a", "3-1", "0-", "0-18446744073709551615"] {
        assert!(processors(list).is_err(), "{list}");
    }
}

#[test]
fn entries_are_as_many_as_there_may_be() {
    assert_eq!([1, 2, 8, 16, 128].map(entries_of_queue), [16, 16, 8, 4, 4]);
}
