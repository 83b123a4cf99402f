// Fills a map in eight goroutines, has the collector run, and prints what is left.
package main

import (
	"fmt"
	"os/user"
	"runtime"
	"sync"
)

func main() {
	const parts, count = 8, 80000
	// The package os/user links with libc, unless the program is built without cgo.
	if _, err := user.Current(); err != nil {
		fmt.Println(err)
	}
	maps := make([]map[string][]int, parts)
	var all sync.WaitGroup
	for part := range maps {
		all.Add(1)
		go func(part int) {
			defer all.Done()
			own := make(map[string][]int)
			for i := 0; i < count; i++ {
				own[fmt.Sprint("key-", i*7919%count)] = []int{i, part, i * 2}
			}
			for i := 0; i < count; i += 2 {
				delete(own, fmt.Sprint("key-", i))
			}
			maps[part] = own
		}(part)
	}
	all.Wait()
	runtime.GC()
	sum := 0
	for _, own := range maps {
		for _, values := range own {
			sum += values[0] + values[1] + values[2]
		}
	}
	fmt.Println(sum, len(maps[3]))
}
