#!/usr/bin/env bash
# The hour of arrivals that `hecaton bench harvest` replays, from Azure Public Dataset V1 (CC-BY 4.0) as prepared by
# huaweicloud/trace_generation_rnn: one CSV of `vm,split,batch,arrival_s,vcpu,mem_gib,life_lo_s,life_hi_s,censored`.
#
#   scripts/azure-hour.sh azure_v1_2017_vms.csv.gz >crates/hecaton/src/bench/harvest/arrivals/azure-v1-hour.csv
#
# Nothing in it is random: the same file gives the same hour.
set -euo pipefail
[ $# -eq 1 ] || {
    echo "usage: $0 AZURE_V1_VMS.csv.gz" >&2
    exit 2
}
zcat -- "$1" | awk '
BEGIN {
    FS = ","
    # Noon of a working day; hosts as those of the paper, 512 GiB of which 64 are left to the host.
    start = 684 * 3600; hosts = 512; host_gib = 448; min_gib = 32; wanted = 10
}
NR == 1 || $2 != "test" { next }
{
    # Neighbours of the file go to different hosts (multiplicative hashing).
    host = int($1 * 2654435761 % 4294967296 / 4294967296 * hosts)
    # Of a life a range is known. The middle of it.
    leaves = $4 + ($7 + $8) / 2 - start
    stays = $9 == 1 || leaves >= 3600
}
$4 < start && ($9 == 1 || leaves > 0) {
    if (stays) staying[host] += $6
    else { n = ++count[host]; bin[host, n] = -1; life[host, n] = leaves; gib[host, n] = $6 }
}
$4 >= start && $4 < start + 3600 {
    n = ++count[host]
    # Arrivals are known to five minutes. They are spread over these in the order of the file.
    bin[host, n] = $4 - start; rank[host, n] = ++bins[$4 - start]
    life[host, n] = ($7 + $8) / 2; censored[host, n] = $9; gib[host, n] = $6
    arriving[host] += $6
}
# The most that regular VMs have of a host at once.
function peak(h,    n, m, most, now) {
    for (n = 1; n <= count[h]; n++) {
        now = staying[h]
        for (m = 1; m <= count[h]; m++)
            if (from[h, m] <= from[h, n] && (to[h, m] == "" || to[h, m] > from[h, n])) now += gib[h, m]
        if (now > most) most = now
    }
    return most
}
END {
    for (h = 0; h < hosts; h++) {
        for (n = 1; n <= count[h]; n++) {
            b = bin[h, n]
            from[h, n] = b < 0 ? 0 : int(b + 300 * (rank[h, n] - 0.5) / bins[b])
            to[h, n] = int((b < 0 ? 0 : from[h, n]) + life[h, n])
            if (censored[h, n] == 1 || to[h, n] >= 3600) to[h, n] = ""
        }
        # Not nearly empty ones, and none in which a harvest VM would have to go.
        if (staying[h] >= 0.4 * host_gib && peak(h) + min_gib <= host_gib) fits[h] = 1
    }
    print "# host,arrives_s,leaves_s,gib of regular VMs in one hour. arrives_s 0: there from the start; leaves_s empty: stays."
    print "# Rows `host,stays,,gib`: what VMs have that are there for all of the hour."
    print "# From Azure Public Dataset V1 (Microsoft, CC-BY 4.0), as prepared by huaweicloud/trace_generation_rnn;"
    print "# changed by scripts/azure-hour.sh: " wanted " of " hosts " hosts, those with most memory arriving."
    for (i = 0; i < wanted; i++) {
        best = -1
        for (h = 0; h < hosts; h++)
            if (fits[h] && (best < 0 || arriving[h] > arriving[best])) best = h
        delete fits[best]
        printf "%d,stays,,%s\n", i, staying[best]
        for (n = 1; n <= count[best]; n++)
            rows[n] = sprintf("%d,%d,%s,%s", i, from[best, n], to[best, n], gib[best, n])
        for (n = 1; n <= count[best]; n++) print rows[n]
    }
}'
