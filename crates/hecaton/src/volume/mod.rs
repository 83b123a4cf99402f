//! `hecaton volume`: pool memory as disks.

mod attach;
pub(crate) mod show;

use crate::cluster::{ClusterArgs, ListArgs};
use crate::listen;
use crate::placement::CopyArgs;
use crate::terminal::failure::usage;
use anyhow::{Context as _, bail};
use clap::{ArgGroup, Subcommand};
use hecaton_block::requests::buffer::{MAX_BUFFER_BYTES, MIN_BUFFER_BYTES};
use hecaton_block::ublk::disk;
use hecaton_block::volume::MAX_VOLUME_BYTES;
use hecaton_memory::{PAGE_SIZE, Size, pages_to_bytes};
use hecaton_node::socket::message::{
    CreateVolume, DetachVolume, Export, ResizeVolume, SnapshotVolume, Unexport,
};
use hecaton_node::volumes::{AddressError, ExportAddress, Exported};
use hecaton_space::{Redundancy, SpaceConfig};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The commands about volumes.
#[derive(Subcommand)]
pub(crate) enum Volume {
    /// Creates a volume; it takes memory of the pool as it is written, and lives as long as this
    /// host's node does
    Create(CreateArgs),
    /// Serves a volume as a network block device, as the drive of a virtual machine, as a file, or
    /// as a block device of this host
    Export(ExportArgs),
    /// Takes an export back; the others of the volume stay, and so does what is in it
    Unexport(UnexportArgs),
    /// Lists the volumes of this host
    List(ListArgs),
    /// Shows one of them, and how the pool holds it
    Status(show::StatusArgs),
    /// Copies a volume as it is at this moment, while clients go on writing; the copy is a volume
    /// that can be read only
    Snapshot(SnapshotArgs),
    /// Lets other nodes read a volume, each by a process of its own and straight from the donors,
    /// for as long as nobody writes to it; they attach it with --read-only
    Share(ShareArgs),
    /// Ends that other nodes may read a volume by themselves
    Unshare(UnshareArgs),
    /// Lets another node have a volume, which is not exported here any more; it is attached there. This node keeps it until
    /// that one serves it. Or ends that a volume of another node is read here
    Detach(DetachArgs),
    /// Has a volume that was detached on another node for this one, with its data where they are: it is served here from
    /// then on, and whatever the other node still sends is refused by donors. Or takes back one of this node that was
    /// detached and not yet attached. Or, with --read-only, reads one that stays the other node's and is shared
    Attach(AttachArgs),
    /// Gives a volume another size, while clients use it; they learn of it when they connect again
    Resize(ResizeArgs),
    /// Gives a volume's memory back, with all data in it
    Delete(DeleteArgs),
}

/// Arguments of `hecaton volume create`.
#[derive(clap::Args)]
pub(crate) struct CreateArgs {
    /// The volume's name, and that of its export
    name: String,
    /// Its size, a multiple of 4096 bytes, up to 1T
    #[arg(long)]
    size: Size,
    /// Takes a size that all copies together could not have in the pool as it is, nor the spill
    /// file on its disk
    #[arg(long)]
    thin: bool,
    /// Puts what the pool has no room for into this file, which must not be there yet and is
    /// removed with the volume; it goes back to the pool when there is room
    #[arg(long, value_name = "FILE")]
    spill: Option<PathBuf>,
    /// Takes no more than this of the pool, for all copies together; what is more goes to the spill file
    #[arg(long, value_name = "SIZE", requires = "spill")]
    limit: Option<Size>,
    /// Answers writes as soon as this host has them, and sends them on in batches, a few
    /// milliseconds later; a flush (fsync) waits for them. No more than this, from 64K to 4M, is
    /// with this host alone. A client that never flushes never knows what donors have
    #[arg(long, value_name = "SIZE")]
    write_buffer: Option<Size>,
    /// Lets several clients write at a time, which must take care of each other; without it one
    /// that writes, or any number of those that read, are attached at a time
    #[arg(long)]
    multi_writer: bool,
    #[command(flatten)]
    copies: CopyArgs,
    /// Seconds that a donor may be away before requests fail for pages that only donors have that
    /// are away
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    donor_patience: u64,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton volume export`.
#[derive(clap::Args)]
#[command(group(ArgGroup::new("way").required(true)))]
pub(crate) struct ExportArgs {
    /// The volume
    name: String,
    /// Where clients of the NBD protocol are to connect: 127.0.0.1:10809, with port 0 a free one,
    /// or unix:PATH, which only this user and root may use
    #[arg(long, group = "way", value_name = "ADDRESS", value_parser = nbd_address)]
    nbd: Option<ExportAddress>,
    /// The socket of a vhost-user-blk device, to which the monitor of a virtual machine connects,
    /// as QEMU does: only this user and root may. The guest's memory must be shared
    #[arg(long, group = "way", value_name = "PATH")]
    vhost_user: Option<PathBuf>,
    /// Shows the volume as a file, to be mapped, mounted or used for a loop device: the name of an
    /// empty file, or of none. The node must run as root
    #[arg(long, group = "way", value_name = "PATH")]
    fuse: Option<PathBuf>,
    /// Has the requests of the file come through io_uring, with one system call for each instead of two, where the
    /// kernel lets them (Linux 6.14 with fuse.enable_uring=Y). When the process that serves the volume is killed, who
    /// has the file open finds errors then, where otherwise he would wait
    #[arg(long, requires = "fuse")]
    uring: bool,
    /// Makes the volume a block device of this host, /dev/ublkbN with a number that is free. The
    /// node must run as root, and the kernel have ublk (Linux 6.4)
    #[arg(long, group = "way")]
    ublk: bool,
    /// Lets clients read only, whatever they speak: a drive and a file, too, are not to be written
    /// then. Any number of them may be attached while none is that may write
    #[arg(long)]
    read_only: bool,
    /// Has clients of the NBD protocol speak TLS, and shows them the certificate in this directory,
    /// which `hecaton pki issue --role export` makes. Clients show one of role client or admin, or
    /// of role read-only, which may not write
    #[arg(long, value_name = "DIR", conflicts_with_all = ["vhost_user", "fuse", "ublk"])]
    tls: Option<PathBuf>,
    /// Takes an address that other hosts can reach, though nothing is encrypted or authenticated
    #[arg(long)]
    insecure: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton volume unexport`.
#[derive(clap::Args)]
#[command(group(ArgGroup::new("way").required(true)))]
pub(crate) struct UnexportArgs {
    /// The volume
    name: String,
    /// The address of an NBD export, with the port that it has: 127.0.0.1:10809, or unix:PATH
    #[arg(long, group = "way", value_name = "ADDRESS", value_parser = nbd_address)]
    nbd: Option<ExportAddress>,
    /// The socket of a vhost-user-blk device
    #[arg(long, group = "way", value_name = "PATH")]
    vhost_user: Option<PathBuf>,
    /// The volume's file, which goes
    #[arg(long, group = "way", value_name = "PATH")]
    fuse: Option<PathBuf>,
    /// The volume's block device, which goes
    #[arg(long, group = "way")]
    ublk: bool,
    /// Does it while somebody is attached, too: clients are cut off, who has the file or device
    /// open gets errors from then on, and what is only in this host's page cache is lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton volume snapshot`.
#[derive(clap::Args)]
pub(crate) struct SnapshotArgs {
    /// The volume
    name: String,
    /// The copy's name, and that of its export. It takes as much of the pool as the volume's data
    snapshot: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton volume detach`.
#[derive(clap::Args)]
pub(crate) struct DetachArgs {
    /// The volume
    name: String,
    /// The node that is to have it. Not of a volume that is only read here
    #[arg(long, value_name = "NODE")]
    to: Option<String>,
    /// Where that node is to connect to this one, for the volume's tables; with port 0 a free port.
    /// Without this at the address of this node's donors
    #[arg(long, value_name = "ADDRESS", requires = "to")]
    listen: Option<SocketAddr>,
    /// Takes an address that other hosts can reach though the nodes have no certificates
    #[arg(long, requires = "listen")]
    insecure: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton volume share`.
#[derive(clap::Args)]
pub(crate) struct ShareArgs {
    /// The volume
    name: String,
    /// Where other nodes are to connect to this one; with port 0 a free port. Without this at the
    /// address of this node's donors
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Takes an address that other hosts can reach though the nodes have no certificates
    #[arg(long, requires = "listen")]
    insecure: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton volume unshare`.
#[derive(clap::Args)]
pub(crate) struct UnshareArgs {
    /// The volume
    name: String,
    /// Does it while nodes are attached, too: what they are asked fails from then on. Waits until they cannot read any more
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton volume attach`.
#[derive(clap::Args)]
pub(crate) struct AttachArgs {
    /// The volume
    name: String,
    /// Reads it here, beside other nodes; it stays the node's that shares it, and while it is read, nobody writes to it
    #[arg(long)]
    read_only: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton volume resize`.
#[derive(clap::Args)]
pub(crate) struct ResizeArgs {
    /// The volume
    name: String,
    /// Its size from now on, a multiple of 4096 bytes, up to 1T; nothing beyond it may be in use
    #[arg(long)]
    size: Size,
    /// Takes a size that all copies together could not have in the pool as it is
    #[arg(long)]
    thin: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton volume delete`.
#[derive(clap::Args)]
pub(crate) struct DeleteArgs {
    /// The volume
    name: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn run(volume: Volume) -> anyhow::Result<ExitCode> {
    match volume {
        Volume::Create(args) => create(args)?,
        Volume::Export(args) => export(args)?,
        Volume::Unexport(args) => unexport(args)?,
        Volume::List(args) => show::list(&args)?,
        Volume::Status(args) => show::status(&args)?,
        Volume::Detach(args) => detach(args)?,
        Volume::Attach(args) => attach::attach(&args.name, args.read_only, &args.cluster)?,
        Volume::Share(args) => share(args)?,
        Volume::Unshare(args) => {
            let address = ExportAddress::Nodes(None);
            let wish = Unexport { volume: args.name, address, force: args.force };
            args.cluster.need_local_node()?.unexport_volume(wish)?;
        }
        Volume::Resize(args) => resize(args)?,
        Volume::Snapshot(args) => {
            let wish = SnapshotVolume { volume: args.name, name: args.snapshot };
            args.cluster.need_local_node()?.snapshot_volume(wish)?;
        }
        Volume::Delete(args) => args.cluster.need_local_node()?.delete_volume(&args.name)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn create(args: CreateArgs) -> anyhow::Result<()> {
    check_size(args.size)?;
    let copies = args.copies.mirror.unwrap_or(1);
    if let Err(error) = Redundancy::of_copies(copies) {
        usage!("{error}");
    }
    // The node has another working directory.
    let spill = args.spill.as_deref().map(std::path::absolute).transpose();
    let spill = spill.context("cannot use the path of the spill file")?;
    let least = pages_to_bytes(1 << SpaceConfig::SEGMENT_ORDER) * u64::from(copies);
    if let Some(limit) = args.limit.filter(|limit| limit.0 < least) {
        usage!(
            "--limit {limit} is less than the {} that {copies} copies of the least part take",
            Size(least)
        );
    }
    let buffers = MIN_BUFFER_BYTES..=MAX_BUFFER_BYTES;
    if let Some(buffer) = args.write_buffer.filter(|buffer| !buffers.contains(&buffer.0)) {
        usage!(
            "--write-buffer {buffer}: give from {} to {}",
            Size(MIN_BUFFER_BYTES),
            Size(MAX_BUFFER_BYTES)
        );
    }
    if !args.thin {
        let limit = args.limit.map(|limit| limit.0);
        check_room(&args.cluster, args.size, copies, spill.as_deref(), limit)?;
    }
    let wish = CreateVolume {
        name: args.name,
        size_bytes: args.size.0,
        donor_patience_s: Some(args.donor_patience),
        spill,
        limit_bytes: args.limit.map(|limit| limit.0),
        multi_writer: args.multi_writer,
        write_buffer_bytes: args.write_buffer.map(|size| size.0),
        ..args.copies.of_volume()
    };
    Ok(args.cluster.need_local_node()?.create_volume(wish)?)
}

fn detach(args: DetachArgs) -> anyhow::Result<()> {
    let DetachArgs { name: volume, to, listen, insecure, cluster } = args;
    if let Some(to) = &to
        && let Some(manager) = cluster.manager()?
    {
        let status = manager.status()?;
        let names: Vec<_> = status.nodes.iter().map(|node| node.report.name.as_str()).collect();
        if !names.contains(&to.as_str()) {
            bail!("the cluster has no node `{to}`; it has {}", names.join(", "));
        }
    }
    cluster.need_local_node()?.detach_volume(DetachVolume { volume, to, listen, insecure })?;
    Ok(())
}

fn share(args: ShareArgs) -> anyhow::Result<()> {
    let mut node = args.cluster.need_local_node()?;
    let (volume, listen, insecure) = (args.name, args.listen, args.insecure);
    let wish = Export {
        volume,
        address: ExportAddress::Nodes(listen),
        read_only: true,
        tls: None,
        insecure,
        uring: false,
    };
    let address = node.export_volume(wish)?;
    println!("{address}");
    Ok(())
}

fn resize(args: ResizeArgs) -> anyhow::Result<()> {
    check_size(args.size)?;
    let mut node = args.cluster.need_local_node()?;
    if !args.thin {
        let report = node.status()?;
        let volume = report.volumes.iter().find(|volume| volume.name == args.name);
        // The node says of another that there is none.
        if let Some(volume) = volume.filter(|volume| args.size.0 > volume.size_bytes) {
            let spill = volume.spill.as_deref();
            check_room(&args.cluster, args.size, volume.copies, spill, volume.limit_bytes)?;
        }
    }
    Ok(node.resize_volume(ResizeVolume { volume: args.name, size_bytes: args.size.0 })?)
}

fn check_size(size: Size) -> anyhow::Result<()> {
    let Size(bytes) = size;
    if !bytes.is_multiple_of(PAGE_SIZE as u64) || !(1..=MAX_VOLUME_BYTES).contains(&bytes) {
        usage!(
            "--size: {bytes} bytes are no size for a volume: it has a multiple of {PAGE_SIZE}, \
             up to {}",
            Size(MAX_VOLUME_BYTES)
        );
    }
    Ok(())
}

/// Refuses a size that the pool and the disk of the spill file could not hold together.
fn check_room(
    cluster: &ClusterArgs,
    size: Size,
    copies: u8,
    spill: Option<&Path>,
    limit: Option<u64>,
) -> anyhow::Result<()> {
    let Some(manager) = cluster.manager()? else {
        usage!("without a manager nobody knows how large the pool is: add --thin");
    };
    let status = manager.status()?;
    let donors = status.nodes.iter().flat_map(|node| &node.report.donors);
    let lent: u64 = donors.map(|donor| donor.lend_bytes).sum();
    let in_pool = limit.map_or(lent, |limit| limit.min(lent)) / u64::from(copies);
    let on_disk = spill.map(free_bytes).transpose()?;
    if size.0 <= in_pool.saturating_add(on_disk.unwrap_or(0)) {
        return Ok(());
    }
    let disk = on_disk.map_or_else(String::new, |free| {
        format!(" and the {} that are free for its spill file together", Size(free))
    });
    usage!(
        "--size {size} with {copies} copies of each page is more than the {} of the pool{disk}; add \
         --thin if it will not be filled",
        Size(in_pool * u64::from(copies))
    );
}

/// Free bytes on the disk of a file, which need not exist yet.
fn free_bytes(file: &Path) -> anyhow::Result<u64> {
    let dir = file.parent().unwrap_or(file);
    let disk = rustix::fs::statvfs(dir);
    let disk = disk.with_context(|| format!("cannot use {} for the spill file", dir.display()))?;
    Ok(disk.f_bavail * disk.f_frsize)
}

fn export(args: ExportArgs) -> anyhow::Result<()> {
    let address = address(args.nbd, args.vhost_user, args.fuse, args.ublk)?;
    if let (ExportAddress::Tcp(address), None) = (&address, &args.tls) {
        listen::check("--nbd", *address, args.insecure)?;
    }
    let name = args.name.clone();
    let tls = args.tls.as_deref().map(absolute).transpose()?;
    let (read_only, uring) = (args.read_only, args.uring);
    let (tls_dir, insecure) = (tls.clone(), args.insecure);
    let wish = Export { volume: args.name, address, read_only, tls: tls_dir, insecure, uring };
    let address = args.cluster.need_local_node()?.export_volume(wish)?;
    println!("{}", uri(&Exported { address, read_only, tls, uring }, &name));
    Ok(())
}

fn unexport(args: UnexportArgs) -> anyhow::Result<()> {
    let address = address(args.nbd, args.vhost_user, args.fuse, args.ublk)?;
    let wish = Unexport { volume: args.name, address, force: args.force };
    Ok(args.cluster.need_local_node()?.unexport_volume(wish)?)
}

/// The one of them that is given.
fn address(
    nbd: Option<ExportAddress>,
    vhost_user: Option<PathBuf>,
    fuse: Option<PathBuf>,
    ublk: bool,
) -> anyhow::Result<ExportAddress> {
    let socket = nbd.or(vhost_user.map(ExportAddress::VhostUser));
    let file = socket.or(fuse.map(ExportAddress::Fuse));
    let given = file.or(ublk.then_some(ExportAddress::Ublk(None)));
    Ok(match given.expect("one of the four is required") {
        address @ (ExportAddress::Tcp(_) | ExportAddress::Ublk(_) | ExportAddress::Nodes(_)) => {
            address
        }
        ExportAddress::Unix(path) => ExportAddress::Unix(absolute(&path)?),
        ExportAddress::VhostUser(path) => ExportAddress::VhostUser(absolute(&path)?),
        ExportAddress::Fuse(path) => ExportAddress::Fuse(absolute(&path)?),
    })
}

/// The node has another working directory.
fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot use {}", path.display()))
}

fn nbd_address(text: &str) -> Result<ExportAddress, AddressError> {
    match text.parse::<ExportAddress>()? {
        address @ (ExportAddress::Tcp(_) | ExportAddress::Unix(_)) => Ok(address),
        _ => Err(AddressError(text.to_owned())),
    }
}

/// URI for NBD clients, socket for a machine monitor, or name of the file or device.
fn uri(export: &Exported, name: &str) -> String {
    let scheme = if export.tls.is_some() { "nbds" } else { "nbd" };
    match &export.address {
        ExportAddress::Tcp(address) => format!("{scheme}://{address}/{name}"),
        ExportAddress::Unix(path) => format!("{scheme}+unix:///{name}?socket={}", path.display()),
        address @ ExportAddress::VhostUser(_) => address.to_string(),
        ExportAddress::Fuse(path) => path.display().to_string(),
        ExportAddress::Ublk(Some(number)) => disk::path(*number).display().to_string(),
        address @ (ExportAddress::Ublk(None) | ExportAddress::Nodes(_)) => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_shown_as_clients_write_them() {
        let shown = |text: &str, tls| {
            uri(
                &Exported { address: text.parse().unwrap(), read_only: false, tls, uring: false },
                "a",
            )
        };
        let uri = |text: &str| shown(text, None);
        let with_tls = |text: &str| shown(text, Some("/pki".into()));
        assert_eq!(with_tls("127.0.0.1:10809"), "nbds://127.0.0.1:10809/a");
        assert_eq!(with_tls("unix:/run/a.sock"), "nbds+unix:///a?socket=/run/a.sock");
        assert_eq!(uri("127.0.0.1:10809"), "nbd://127.0.0.1:10809/a");
        assert_eq!(uri("unix:/run/a.sock"), "nbd+unix:///a?socket=/run/a.sock");
        assert_eq!(uri("vhost-user:/run/a.sock"), "vhost-user:/run/a.sock");
        assert_eq!(uri("fuse:/mnt/a"), "/mnt/a");
        assert_eq!(uri("ublk:3"), "/dev/ublkb3");
    }

    #[test]
    fn a_machines_socket_is_no_address_of_nbd() {
        assert!(nbd_address("unix:/run/a.sock").is_ok());
        assert!(nbd_address("vhost-user:/run/a.sock").is_err());
        assert!(nbd_address("fuse:/mnt/a").is_err());
        assert!(nbd_address("ublk").is_err());
    }
}
