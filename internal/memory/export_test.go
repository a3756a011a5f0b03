package memory

// For tests outside.
var Weigh = weigh

// CleanUp carries out what is left to do at once.
func (c *Cache) CleanUp() { c.records.CleanUp() }
