//! The volumes that the node before this one has left: each hands over what it is, its sockets and its
//! tables, and is supervised like any other from then on.

use super::export::Entrance;
use super::{
    Copying, Deletion, Resizing, Unexporting, Volume, VolumeReport, VolumeStart, VolumeState,
    Volumes, VolumesError,
};
use crate::adopt::{Adopted, adopt};
use crate::causes::with_causes;
use crate::held::HeldFds;
use crate::node_dir::NodeDir;
use crate::report::check_name;
use hecaton_memory::pages_to_bytes;
use std::io;
use std::thread;

impl Volumes {
    /// Takes over all volumes that wait in `dir`.
    pub(crate) fn adopt_left(&self, dir: &NodeDir) {
        let Some(patience) = self.0.adopt_within else { return };
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
        let report = VolumeReport {
            name: name.clone(),
            state: VolumeState::Serving,
            // Until it tells another.
            size_bytes: pages_to_bytes(left.config.pages),
            copies: left.config.copies,
            spill: left.config.spill.clone(),
            limit_bytes: left.config.limit_bytes,
            encrypted: left.config.encrypt,
            snapshot_of: left.config.snapshot_of.clone(),
            exports: left.exports.clone(),
            restarts: left.restarts,
            ..VolumeReport::default()
        };
        // One of them may have some of it and be told of by nobody now.
        self.0.donors.remember(left.donors.clone());
        let entrances = left.exports.into_iter().zip(entrances);
        let volume = Volume {
            config: left.config,
            number,
            report,
            entrances: entrances.map(|(at, fd)| Entrance::adopt(at, fd, &name)).collect(),
            held,
            process: None,
            has_served: true,
            told: left.donors,
            word: None,
            told_word: None,
            deletion: Deletion::No,
            resizing: Resizing::No,
            copying: Copying::No,
            unexporting: Unexporting::No,
        };
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
