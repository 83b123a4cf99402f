//! The agent on a host of two NUMA nodes: a guest is the host, for test machines rarely have several. Its machines are real
//! QEMUs that hold memory and run nothing.

use crate::{
    agent::adds_up,
    cluster::Cluster,
    guest::{Machine, Qemu, Spec, guests},
    harness::{Outcome, TestResult},
};
use anyhow::{Context as _, ensure};
use serde_json::Value;
use std::path::Path;

const M: u64 = 1 << 20;

/// A host of two nodes of 768 MiB.
const TWO_NODES: &[&str] = &[
    "-no-reboot",
    "-m",
    "1536M",
    "-object",
    "memory-backend-memfd,id=node0,size=768M,share=on",
    "-object",
    "memory-backend-memfd,id=node1,size=768M,share=on",
    "-numa",
    "node,nodeid=0,memdev=node0,cpus=0",
    "-numa",
    "node,nodeid=1,memdev=node1,cpus=1",
];

/// Machines come, one after the other; after each the host is shown.
const SCRIPT: &str = r#"
export HECATON_LOG=error
die() { echo "guest: at $*"; cat /tmp/log; exit 1; }
until_true() { i=0; until "$@" >/dev/null 2>&1; do i=$((i+1)); [ $i -lt 200 ] || die "$@"; sleep 1; done; }
status() { hecaton host status --json --dir /tmp/n; }
is() { status | grep -q "$1"; }
shmem() { awk '/Shmem:/ { print $4 * 1024 }' /sys/devices/system/node/node1/meminfo; }
create() {
  name=$1; state=$2; shift 2
  hecaton vm create --regular --name $name --dir /tmp/n "$@" >>/tmp/log 2>&1 &
  until_true is "\"name\":\"$name\",\"kind\":\"regular\",\"state\":\"$state\""
  echo "guest: $name $(status)"
}
qemu="qemu-system-x86_64 -M none -accel tcg -nodefaults -display none"
hecaton manager --listen 127.0.0.1:7070 >/tmp/log 2>&1 &
hecaton node --name host --manager http://127.0.0.1:7070 --dir /tmp/n --agent --qmp-dir /tmp/vms \
  --manage 512M --buffer 64M --numa-balance >>/tmp/log 2>&1 &
until_true status
echo "guest: empty $(status)"

create bound running --memory 64M --numa 1 -- $qemu
pid=$(status | sed 's/.*"name":"bound"[^}]*"pid":\([0-9]*\).*/\1/')
fd=$(ls -l /proc/$pid/fd | sed -n 's/.* \([0-9]*\) -> .*memory-backend.*/\1/p')
before=$(shmem)
dd if=/dev/zero of=/proc/$pid/fd/$fd bs=1M count=48 conv=notrunc 2>/dev/null || die fill
echo "guest: filled $(($(shmem) - before)) $(grep memory-backend /proc/$pid/numa_maps)"
create within running --memory 128M -- $qemu
hecaton vm create --regular --memory 300M --numa 0 --dir /tmp/n -- $qemu 2>&1 | grep -q "choose another host" || die refused
hecaton vm create --harvest --balloon --min 16M --max 32M --dir /tmp/n -- $qemu 2>&1 | grep -q "name one with --numa" || die balloon
create spans starting --memory 300M -- idle
"#;

/// A machine's memory is on the node that is named, or within one wherever that can be; one for which no node is large
/// enough spans them, and is counted. Each node keeps its part of the buffer.
pub(crate) fn machines_stay_within_a_node(cluster: &Cluster) -> TestResult {
    let guests = guests!();
    let line = guests.command_line(Qemu::Backports, "");
    let files = [("bin/idle", "#!/bin/sh\nexec sleep 3600\n"), ("bin/numa-host", SCRIPT)];
    let guests = guests.with(cluster.dir("numa-host")?, &cluster.hecaton, &files)?;
    let guests =
        guests.with(cluster.dir("numa-host-qemu")?, Path::new(&line[0]), &[("tmp/.is", "")])?;
    let spec = Spec {
        name: "numa-host",
        script: "sh /bin/numa-host",
        arguments: TWO_NODES,
        ..Spec::default()
    };
    let mut host = Machine::start_with_its_memory(cluster, &guests, &spec)?;

    let empty = status(&mut host, "empty")?;
    ensure!(of_nodes(&empty, "buffer_bytes")? == [32 * M, 32 * M], "the buffer is uneven: {empty}");
    let bound = status(&mut host, "bound")?;
    ensure!(of_nodes(&bound, "regular_bytes")? == [0, 64 * M], "it is on another node: {bound}");
    // Its memory really is there, whoever writes it.
    let filled = host.wait_for("guest: filled")?;
    let bytes: u64 = filled.split(' ').nth(2).context("no figure")?.parse()?;
    // Of the 48 MiB; others give and take a little meanwhile.
    ensure!(bytes > 44 * M && filled.contains(" bind:1 "), "it is bound otherwise: {filled}");
    let within = status(&mut host, "within")?;
    let regular = of_nodes(&within, "regular_bytes")?;
    ensure!(
        regular == [128 * M, 64 * M] || regular == [0, 192 * M],
        "it is on several nodes: {within}"
    );
    ensure!(within["counters"]["spanning"] == 0, "{within}");
    let spans = status(&mut host, "spans")?;
    let regular = of_nodes(&spans, "regular_bytes")?;
    ensure!(regular.iter().sum::<u64>() == 492 * M, "it is not there as a whole: {spans}");
    ensure!(spans["counters"]["spanning"] == 1, "it is not counted: {spans}");
    host.succeed()?;
    Ok(Outcome::Passed)
}

/// What the host has shown under this name.
fn status(host: &mut Machine, name: &str) -> anyhow::Result<Value> {
    let start = format!("guest: {name} ");
    let line = host.wait_for(&start)?;
    let json = line.split_once(&start).context("another line")?.1;
    let status = serde_json::from_str(json).with_context(|| format!("no status: {json}"))?;
    adds_up(&status)?;
    Ok(status)
}

/// A class of each of the two nodes.
fn of_nodes(status: &Value, class: &str) -> anyhow::Result<[u64; 2]> {
    let nodes = status["nodes"].as_array().context("no nodes")?;
    ensure!(nodes.len() == 2, "the host has other nodes: {status}");
    let bytes = |node: usize| nodes[node][class].as_u64().context("a class is missing");
    Ok([bytes(0)?, bytes(1)?])
}
