// Writes 200,000 entries to a database of Badger in memory, and reads them.
package main

import (
	"fmt"

	badger "github.com/dgraph-io/badger/v4"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	database, err := badger.Open(badger.DefaultOptions("").WithInMemory(true).WithLoggingLevel(badger.ERROR))
	check(err)
	batch := database.NewWriteBatch()
	for i := 0; i < 200000; i++ {
		check(batch.Set([]byte(fmt.Sprint("key-", i*7919%200000)), []byte(fmt.Sprintf("%0128d", i))))
	}
	check(batch.Flush())
	sum, count := 0, 0
	check(database.View(func(txn *badger.Txn) error {
		all := txn.NewIterator(badger.DefaultIteratorOptions)
		defer all.Close()
		for all.Rewind(); all.Valid(); all.Next() {
			check(all.Item().Value(func(value []byte) error { sum += int(value[127]); return nil }))
			count++
		}
		return nil
	}))
	check(database.Close())
	fmt.Println(sum, count)
}
