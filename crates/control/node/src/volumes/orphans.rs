//! The volumes that the node before this one has left: each hands over what it is, its sockets and
//! its tables, and is supervised like any other from then on.

use super::export::Entrance;
use super::{ExportAddress, Volume, VolumeStart, VolumeState, Volumes, VolumesError};
use crate::causes::with_causes;
use crate::children::adopt::{Adopted, adopt};
use crate::children::held::HeldFds;
use crate::cluster::report::check_name;
use crate::node_dir::NodeDir;
use hecaton_block::ublk::{self, Owner};
use hecaton_memory::pages_to_bytes;
use std::io;
use std::thread;
use std::time::Duration;

impl Volumes {
    /// Takes over all volumes that wait in `dir`.
    pub(crate) fn adopt_left(&self, dir: &NodeDir) {
        if let Some(patience) = self.0.adopt_within {
            self.adopt_all(dir, patience);
        }
        self.remove_disks_of_nobody(dir);
    }

    fn adopt_all(&self, dir: &NodeDir, patience: Duration) {
        for number in dir.volume_numbers() {
            let orphan = match adopt::<VolumeStart>(&dir.paths().volume_socket(number), patience) {
                Ok(Some(orphan)) => orphan,
                Ok(None) => continue,
                Err(error) => {
                    tracing::error!(error = with_causes(&error), "a volume is left alone");
                    continue;
                }
            };
            let (name, pid) = (orphan.word.config.name.clone(), orphan.child.process.pid());
            match self.take_over(orphan, number) {
                Ok(()) => {
                    tracing::info!(volume = name, pid, "took over the volume of the node before");
                }
                Err(error) => {
                    let error = with_causes(&error);
                    tracing::error!(volume = name, pid, error, "a volume is not taken over");
                }
            }
        }
    }

    /// Volumes whose process was killed together with the node are gone, and their devices wait for
    /// nothing.
    fn remove_disks_of_nobody(&self, dir: &NodeDir) {
        let number = |entrance: &Entrance| match entrance.address() {
            ExportAddress::Ublk(number) => number,
            _ => None,
        };
        let table = self.table();
        let adopted = table.values().flat_map(|volume| volume.entrances.iter().filter_map(number));
        let adopted: Vec<u32> = adopted.collect();
        drop(table);
        for number in ublk::remove_left(Owner::of(dir.paths().dir()), &adopted) {
            let device = ublk::disk::path(number);
            tracing::error!(
                device = %device.display(),
                "the volume of this block device was lost with the node before and the process that served it; the \
                 device is removed, and who has it open finds errors"
            );
        }
    }

    fn take_over(&self, mut orphan: Adopted<VolumeStart>, number: u64) -> Result<(), VolumesError> {
        let word = &orphan.word;
        let mut entrances =
            orphan.child.receiver.take_fds(word.exports.len() + word.labels.len())?;
        let fds = entrances.split_off(word.exports.len());
        let (child, left) = orphan.settled()?;
        let mut held = HeldFds::default();
        held.hold(left.labels, fds).map_err(io::Error::other)?;
        let name = left.config.name.clone();
        check_name(&name)?;
        // One of them may have some of it and be told of by nobody now.
        self.0.donors.remember(left.donors.clone());
        // Until it tells another.
        let size_bytes = pages_to_bytes(left.config.pages);
        let mut volume = Volume::new(left.config, number, size_bytes);
        volume.report.state = VolumeState::Serving;
        volume.report.exports.clone_from(&left.exports);
        volume.report.detached = left.detached;
        volume.report.restarts = left.restarts;
        let entrances = left.exports.into_iter().zip(entrances);
        volume.entrances = entrances.map(|(at, fd)| Entrance::adopt(at, fd, &name)).collect();
        volume.held = held;
        volume.has_served = true;
        volume.told = left.donors;
        {
            let mut table = self.table();
            if table.contains_key(&name) {
                return Err(VolumesError::NameTaken(name));
            }
            table.insert(name.clone(), volume);
        }
        let supervisor = {
            let (volumes, name) = (self.clone(), name.clone());
            move || volumes.supervise(&name, Some(child))
        };
        let spawned = thread::Builder::new().name("volume-supervisor".into()).spawn(supervisor);
        if let Err(error) = spawned {
            self.forget(&name);
            return Err(error.into());
        }
        Ok(())
    }
}
