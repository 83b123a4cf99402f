//! A volume goes from node to node ([`hecaton_block::hand_over`]).
//!
//! The node that has it keeps it, with its process, until the other one has been seen to serve it.
//! The other one has a process for it from the moment that it has the tables, started again for as
//! long as the node is there, whether it has ever served or not: nobody else can.

use super::{
    Handing, Offer, START_PATIENCE, STATE, STOP_GRACE, Volume, VolumeOrder, VolumeState, Volumes,
    VolumesError,
};
use crate::causes::with_causes;
use crate::cluster::report::check_name;
use crate::socket::message::{AttachVolume, DetachVolume};
use hecaton_block::VolumeConfig;
use hecaton_block::hand_over::fetch;
use hecaton_memory::pages_to_bytes;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;

impl Volumes {
    /// Lets another node have a volume that is not exported; where it is to connect. Or ends that a
    /// volume of another node is read here.
    pub fn detach(&self, wish: &DetachVolume) -> Result<Option<SocketAddr>, VolumesError> {
        let name = &wish.volume;
        let refused =
            |reason: String| Err(VolumesError::NotDetached { volume: name.clone(), reason });
        let Some(to) = &wish.to else { return self.read_no_more(name).map(|()| None) };
        check_name(to)?;
        self.with(name, |volume| volume.check_own())??;
        let offer = match self.offer(to, wish) {
            Ok(offer) => offer,
            Err(reason) => return refused(reason),
        };
        let has_tls = self.0.donors.tls_dir().is_some();
        let asked = self.with(name, |volume| {
            volume.check_here()?;
            Ok::<_, VolumesError>(
                volume
                    .why_not_detached(has_tls)
                    .map_or_else(|| volume.ask(&VolumeOrder::Detach(offer)), Err),
            )
        })??;
        if let Err(reason) = asked.and_then(|()| self.handed(name)) {
            return refused(reason);
        }
        let detached = self.with(name, |volume| volume.report.detached.clone())?;
        detached
            .map_or_else(|| refused("it was attached again".to_owned()), |at| Ok(Some(at.address)))
    }

    /// Has a volume of another node, or one of this one that was detached and is not another's;
    /// returns when it is served.
    pub fn attach(&self, wish: &AttachVolume) -> Result<(), VolumesError> {
        let name = &wish.volume;
        check_name(name)?;
        if wish.read_only {
            return self.read(wish);
        }
        let refused =
            |reason: String| Err(VolumesError::NotAttached { volume: name.clone(), reason });
        let here = self.with(name, |volume| match volume.report.detached {
            Some(_) => volume.ask(&VolumeOrder::Keep).map(|()| true),
            None => Ok(false),
        });
        match here {
            Ok(Ok(true)) => return self.handed(name).or_else(refused),
            Ok(Ok(false)) => return Err(VolumesError::IsAttached(name.clone())),
            Ok(Err(reason)) => return refused(reason),
            Err(_) => {}
        }
        let Some((holder, from)) = &wish.from else {
            return Err(VolumesError::Unknown(name.clone()));
        };
        let site = self.0.donors.site().clone();
        let tls_dir = self.0.donors.tls_dir().map(Path::to_owned);
        let fetched = match fetch(name, (holder, *from), &site.host, tls_dir.as_deref()) {
            Ok(fetched) => fetched,
            Err(error) => return refused(with_causes(&error)),
        };
        let config = VolumeConfig { site, tls_dir, ..fetched.config.clone() };
        self.enter(config, pages_to_bytes(fetched.pages))?;
        let held = fetched.tables().map_err(VolumesError::from).and_then(|tables| {
            self.with(name, |volume| {
                // Whatever becomes of its first process, another one has to be there.
                volume.has_served = true;
                volume.held.hold(vec![STATE.to_owned()], vec![tables])
            })?
            .map_err(|error| std::io::Error::other(error).into())
        });
        if let Err(error) = held {
            self.forget(name);
            return Err(error);
        }
        let supervisor = {
            let (volumes, name) = (self.clone(), name.clone());
            move || volumes.supervise(&name, None)
        };
        if let Err(error) =
            thread::Builder::new().name("volume-supervisor".into()).spawn(supervisor)
        {
            self.forget(name);
            return Err(error.into());
        }
        let is_starting = |table: &mut BTreeMap<String, Volume>| {
            table.get(name).is_some_and(|volume| volume.report.state == VolumeState::Starting)
        };
        let (table, _) = self
            .0
            .changed
            .wait_timeout_while(self.table(), START_PATIENCE, is_starting)
            .expect("no thread panics with the table");
        let report = table.get(name).map(|volume| volume.report.clone());
        drop(table);
        match report {
            Some(report) if report.state == VolumeState::Serving => {
                fetched.is_served();
                Ok(())
            }
            Some(report) => {
                let why = report.last_error.as_deref().unwrap_or("its donors may be away");
                refused(format!(
                    "it is this node's from now on, and is not served yet ({why}); its process is started \
                     again until it is: `hecaton volume status {name}`"
                ))
            }
            None => {
                refused("it was taken over by another node, or this one is stopping".to_owned())
            }
        }
    }

    /// Waits for what comes of it.
    fn handed(&self, name: &str) -> Result<(), String> {
        let is_undecided = |table: &mut BTreeMap<String, Volume>| {
            table.get(name).is_some_and(|volume| volume.handing == Handing::Asked)
        };
        let (mut table, _) = self
            .0
            .changed
            .wait_timeout_while(self.table(), STOP_GRACE, is_undecided)
            .expect("no thread panics with the table");
        let Some(volume) = table.get_mut(name) else {
            return Err(
                "it is not here any more: another node has it, or it was deleted".to_owned()
            );
        };
        match &volume.handing {
            // A later answer still counts.
            Handing::Asked => Err("its process does not answer; \
                                   `hecaton volume status` tells what comes of it"
                .to_owned()),
            _ => match std::mem::replace(&mut volume.handing, Handing::No) {
                Handing::Refused(reason) => Err(reason),
                _ => Ok(()),
            },
        }
    }

    fn offer(&self, to: &str, wish: &DetachVolume) -> Result<Offer, String> {
        if to == self.0.donors.site().host {
            return Err(format!("node `{to}` has it"));
        }
        let Some(address) = self.address_for_nodes(wish.listen) else {
            return Err(format!(
                "this node has no donors whose address could be used: say with --listen where node `{to}` is to \
                 connect"
            ));
        };
        if address.ip().is_unspecified() {
            return Err(format!("{address} is no address to connect to: name one of this host's"));
        }
        let is_open = wish.listen.is_some() && !address.ip().is_loopback();
        if is_open && !wish.insecure && self.0.donors.tls_dir().is_none() {
            return Err(format!(
                "{address} can be reached from other hosts, and the node has no certificate; add --insecure if the \
                 network is trusted"
            ));
        }
        Ok(Offer { to: to.to_owned(), address })
    }

    /// Where other nodes are to connect to this one: there, or at its donors' address.
    pub(super) fn address_for_nodes(&self, wanted: Option<SocketAddr>) -> Option<SocketAddr> {
        let own = self.0.donors.own_address().map(|address| SocketAddr::new(address.ip(), 0));
        wanted.or(own)
    }
}

impl Volume {
    /// Why it cannot go to another node; `None` if it can.
    fn why_not_detached(&self, has_tls: bool) -> Option<String> {
        let is_busy = matches!(self.copying, super::Copying::Asked)
            || matches!(self.resizing, super::Resizing::Asked(_))
            || self.deletion == super::Deletion::Asked;
        if let Some(export) = self.report.exports.first() {
            let (address, name) = (&export.address, &self.config.name);
            if let super::ExportAddress::Nodes(_) = address {
                return Some(format!(
                    "it is shared with other nodes: end that first (`hecaton volume unshare {name}`)"
                ));
            }
            return Some(format!(
                "it is exported at {address}: take that back first (`hecaton volume unexport {name}`)"
            ));
        }
        if let Some(spill) = &self.config.spill {
            let spill = spill.display();
            return Some(format!("its spill file, {spill}, is on this host's disk and stays here"));
        }
        if self.config.for_swap {
            return Some("this host's kernel swaps to it".to_owned());
        }
        if self.config.encrypt && !has_tls {
            return Some(
                "it is encrypted, and its key goes to another node by TLS only: nodes need certificates for that \
                 (`hecaton pki`)"
                    .to_owned(),
            );
        }
        is_busy.then(|| "it is being copied, resized or deleted; try again".to_owned())
    }

    /// Orders something that comes to [`Handing`].
    fn ask(&mut self, order: &VolumeOrder) -> Result<(), String> {
        if self.handing == Handing::Asked || self.process.is_none() {
            return Err("its process is starting, or was asked for it before; try again".to_owned());
        }
        self.handing = Handing::Asked;
        self.order(order, None);
        Ok(())
    }

    pub(super) fn handed(&mut self, came_of_it: Handing) {
        if self.handing == Handing::Asked {
            self.handing = came_of_it;
        }
    }
}
